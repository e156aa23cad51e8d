"""The block tables of all requests."""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from trioserve.core.block_pool import BlockPool, BlockPoolStatistics
from trioserve.core.prefix_cache import CachedPrefix, PrefixCache
from trioserve.worker.kv_layout import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from trioserve.core.request import Request
    from trioserve.core.stats import CacheEvents
    from trioserve.worker.kv_layout import KVCacheLayout

__all__ = ["KVCacheManager"]


class KVCacheManager:
    """Gives requests the blocks that their tokens are computed into, and takes them back.

    A request's positions and blocks, for a block size of 4 (intervals are half-open, one digit a position):

        [0, cached)           found in the prefix cache: shared blocks, always full ones, read only
        [cached, computed)    computed by earlier steps of this request
        [computed, known)     computed by the next steps: blocks of its own, written to

        position         0  3 4  7 8 11 12 .. 16
        full group      |0000|0000|1111|1122|2...|      0 cached, 1 computed, 2 new
                        |shared   |own           |
        window of 6     |----|--00|1111|1122|2...|      - NULL_BLOCK: no token from 14 on looks there
        full and computed: the first three, which others may find from now on

    Each group of layers has a table of its own. All draw from one pool, and each block belongs to one group
    for as long as it is held. A window group needs blocks for a bounded number of positions, however long
    the sequence: it gets them as steps reach them, and gives them back as they fall out of the window.
    """

    # Invariants, checked by check():
    # - a block that a step may write to has exactly one holder, and nobody can find it;
    # - a block is held as often as tables refer to it, always as the same place of the same group;
    # - tables of window groups begin with one NULL_BLOCK per block that no later token looks at; nothing
    #   else is NULL_BLOCK;
    # - all full groups' tables of a request have one length, all its window groups' one that is not larger.

    def __init__(
        self, num_blocks: int, layout: KVCacheLayout, *, enable_prefix_caching: bool = True, model: str = ""
    ) -> None:
        """`model` names what computes the content, and goes into every block's hash."""
        self.block_size = layout.block_size
        self._layout = layout
        self._pool = BlockPool(num_blocks)
        self._prefix_cache = PrefixCache(self._pool, layout, model) if enable_prefix_caching else None
        self._nothing_cached = CachedPrefix(num_tokens=0, blocks=[()] * len(layout.windows))
        self._window_groups = _groups_by_window(layout)
        self._shortest_group = self._window_groups[0][0] if self._window_groups else 0

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, 0 to 1; what only the prefix cache keeps counts as free."""
        return 1 - self._pool.num_free / self._pool.num_blocks

    def can_hold(self, num_tokens: int, step_tokens: int) -> bool:
        """A sequence of `num_tokens` always fits if it is alone and steps compute at most `step_tokens`."""
        return self._pool.num_blocks >= self._layout.max_blocks(num_tokens, step_tokens)

    def hash_prompt(self, request: Request) -> None:
        """Make the next `find_cached` of this request cheap: about 1 us per block are spent here instead."""
        if self._prefix_cache is not None and _reads_prefix_cache(request):
            self._prefix_cache.hash_prompt(request)

    def find_cached(self, request: Request) -> CachedPrefix:
        """The known beginning of a request that holds no block yet; valid until blocks are next given out."""
        if self._prefix_cache is None or not _reads_prefix_cache(request):
            return self._nothing_cached
        return self._prefix_cache.find(request)

    def admit(self, request: Request, cached: CachedPrefix, num_tokens: int) -> bool:
        """Give a request without blocks what it needs to start behind the `cached` ones; False, and nothing
        done, if too few are free.

        Full groups get blocks for all known tokens, so that two long prompts are not admitted on blocks that
        suffice for one; window groups for its first step, which computes up to position `num_tokens`.
        """
        assert not request.block_tables, f"request {request.request_id} is admitted twice"
        num_cached = cached.num_tokens // self.block_size
        num_new = [length - num_cached for length in self._first_lengths(request, num_tokens)]
        found = [block for blocks in cached.blocks for block in blocks if block != NULL_BLOCK]
        num_revived = sum(self._pool.num_holders(block) == 0 for block in found)
        if sum(num_new) + num_revived > self._pool.num_free:
            return False
        self._pool.share(found)
        request.block_tables = [
            [*blocks, *self._pool.take(count)] for blocks, count in zip(cached.blocks, num_new, strict=True)
        ]
        request.num_published_blocks = num_cached
        request.num_computed_tokens = cached.num_tokens
        return True

    def _first_lengths(self, request: Request, num_tokens: int) -> list[int]:
        """Of each group's table."""
        step = self._blocks_for(num_tokens)
        known = max(step, self._blocks_for(request.num_known_tokens))
        return [known if window is None else step for window in self._layout.windows]

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Let all tables cover positions up to `num_tokens`; False, and nothing done, if blocks are too few.

        A step in flight does not mind: tables only grow at their ends.
        """
        tables = request.block_tables
        if num_tokens <= len(tables[self._shortest_group]) * self.block_size:
            return True
        num_blocks = self._blocks_for(num_tokens)
        if sum(max(0, num_blocks - len(table)) for table in tables) > self._pool.num_free:
            return False
        for table in tables:
            table.extend(self._pool.take(max(0, num_blocks - len(table))))
        return True

    def advance(self, request: Request) -> None:
        """After `num_computed_tokens` grew: let others find the blocks that have become full, and take back
        those that windows have left behind. No step that computes this request may be in flight.

        In this order, so that a block can be found for a while after nobody holds it any more. Costs the same
        however long the request is, and little as long as no end of a window crosses into another block.
        """
        cache = None if request.is_search else self._prefix_cache
        num_computed = request.num_computed_tokens
        if cache is not None and num_computed >= (request.num_published_blocks + 1) * self.block_size:
            cache.publish(request)
        if self._window_groups:
            self._leave_behind(request)

    def _leave_behind(self, request: Request) -> None:
        for groups in self._window_groups:
            end = self._layout.first_needed_block(groups[0], request.num_computed_tokens)
            if end and request.block_tables[groups[0]][end - 1] != NULL_BLOCK:
                self._release_before(end, [request.block_tables[group] for group in groups])

    def _release_before(self, end: int, tables: Sequence[list[int]]) -> None:
        """All of these tables have the same window, so also the same number of NULL_BLOCKs."""
        start = end - 1
        while start and tables[0][start - 1] != NULL_BLOCK:
            start -= 1
        self._pool.release(_last_first([table[start:end] for table in tables]))
        for table in tables:
            table[start:end] = [NULL_BLOCK] * (end - start)

    def free(self, request: Request) -> None:
        """Take a request's blocks back, the last one first: a prefix outlives what follows it."""
        self._pool.release(_last_first(request.block_tables))
        request.block_tables = []
        request.num_published_blocks = 0
        request.num_computed_tokens = 0

    def reset_prefix_cache(self) -> bool:
        """Forget all content; False, and nothing done, while any request holds a block."""
        return self._pool.forget_contents()

    def take_events(self) -> CacheEvents:
        """What became of the prefix cache's contents since the last call."""
        return self._pool.take_events()

    def statistics(self) -> BlockPoolStatistics:
        return self._pool.statistics()

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that exactly these requests hold blocks, and the invariants of pool and tables."""
        self._pool.check()
        num_holders = [0] * self._pool.num_blocks
        places: dict[int, tuple[int, int]] = {}
        for request in requests:
            for group, table in enumerate(request.block_tables):
                self._check_table(request, group, table)
                for index, block in enumerate(table):
                    if block != NULL_BLOCK:
                        num_holders[block] += 1
                        place = places.setdefault(block, (group, index))
                        assert place == (group, index), "a block is held as two different ones"
        assert all(self._pool.num_holders(block) == count for block, count in enumerate(num_holders))

    def _check_table(self, request: Request, group: int, table: Sequence[int]) -> None:
        num_computed = request.num_computed_tokens
        assert num_computed <= len(table) * self.block_size, "a table is too short"
        shortest = request.block_tables[self._shortest_group]
        is_full = self._layout.windows[group] is None
        assert len(table) >= len(shortest) if is_full else len(table) == len(shortest)
        num_null = self._layout.first_needed_block(group, num_computed)
        assert [block == NULL_BLOCK for block in table] == [index < num_null for index in range(len(table))]
        for block in table[num_computed // self.block_size :]:
            assert self._pool.num_holders(block) == 1, "a block that is written to is shared"
            assert not self._pool.is_named(block), "a block that is written to can be found"

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _reads_prefix_cache(request: Request) -> bool:
    return request.params.reads_prefix_cache and not request.is_search


def _groups_by_window(layout: KVCacheLayout) -> list[list[int]]:
    """Window groups, those of the same window together: they always give back the same places."""
    by_window: dict[int, list[int]] = {}
    for group, window in enumerate(layout.windows):
        if window is not None:
            by_window.setdefault(window, []).append(group)
    return list(by_window.values())


def _last_first(tables: Sequence[Sequence[int]]) -> Iterator[int]:
    """The blocks of tables, from the last place to the first, whatever the group."""
    if len(tables) == 1:  # every model without windows
        return filter(NULL_BLOCK.__ne__, reversed(tables[0]))
    places = reversed(list(zip_longest(*tables, fillvalue=NULL_BLOCK)))
    return filter(NULL_BLOCK.__ne__, chain.from_iterable(places))
