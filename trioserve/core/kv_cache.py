"""The block tables of all requests."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from trioserve.core.block_pool import BlockPool, BlockPoolStatistics
from trioserve.core.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trioserve.core.request import Request

__all__ = ["KVCacheManager"]


class KVCacheManager:
    """Gives requests the blocks that their tokens are computed into, and takes them back.

    A request's positions and blocks, for a block size of 4 (intervals are half-open, one digit a position):

        [0, cached)           found in the prefix cache: shared blocks, always full ones, read only
        [cached, computed)    computed by earlier steps of this request
        [computed, known)     computed by the next steps: blocks of its own, written to

        position   0  3 4  7 8 11 12 .. 16
                  |0000|0000|1111|1122|2...|      0 cached, 1 computed, 2 new
                  |shared   |own           |
        full and computed: the first three, which others may find from now on

    Invariant: a block that a step may write to has exactly one holder.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, model: str = ""
    ) -> None:
        """`model` names what computes the content, and goes into every block's hash."""
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._prefix_cache = PrefixCache(self._pool, block_size, model) if enable_prefix_caching else None

    @property
    def num_tokens(self) -> int:
        """How many positions there are in all."""
        return self._pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, 0 to 1; what only the prefix cache keeps counts as free."""
        return 1 - self._pool.num_free / self._pool.num_blocks

    def find_cached(self, request: Request) -> Sequence[int]:
        """Blocks for the beginning of a request that holds none yet; valid until the next `allocate`."""
        return () if self._prefix_cache is None else self._prefix_cache.find(request)

    def admit(self, request: Request, cached: Sequence[int]) -> bool:
        """Give a request without blocks all that its known tokens need; False, and nothing done, if too few.

        The request starts behind the `cached` blocks.
        """
        assert not request.block_table, f"request {request.request_id} is admitted twice"
        num_new = self._blocks_for(request.num_known_tokens) - len(cached)
        num_revived = sum(self._pool.num_holders(block) == 0 for block in cached)
        if num_new + num_revived > self._pool.num_free:
            return False
        self._pool.share(cached)
        request.block_table = [*cached, *self._pool.take(num_new)]
        request.num_published_blocks = len(cached)
        request.num_computed_tokens = len(cached) * self.block_size
        return True

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Let the table cover positions [0, num_tokens); False, and nothing done, if blocks are too few."""
        table = request.block_table
        if num_tokens <= len(table) * self.block_size:
            return True
        num_new = self._blocks_for(num_tokens) - len(table)
        if num_new > self._pool.num_free:
            return False
        table += self._pool.take(num_new)
        return True

    def publish(self, request: Request) -> None:
        """After `num_computed_tokens` grew: let others find the blocks that have become full."""
        if self._prefix_cache is None:
            return
        if request.num_computed_tokens >= (request.num_published_blocks + 1) * self.block_size:
            self._prefix_cache.publish(request)

    def free(self, request: Request) -> None:
        """Take a request's blocks back, the last one first: a prefix outlives what follows it."""
        self._pool.release(reversed(request.block_table))
        request.block_table = []
        request.num_published_blocks = 0
        request.num_computed_tokens = 0

    def reset_prefix_cache(self) -> bool:
        """Forget all content; False, and nothing done, while any request holds a block."""
        return self._pool.forget_contents()

    def statistics(self) -> BlockPoolStatistics:
        return self._pool.statistics()

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that exactly these requests hold blocks, and the invariants of pool and tables."""
        self._pool.check()
        holders = Counter(block for request in requests for block in request.block_table)
        assert self._pool.num_blocks - self._pool.num_free == len(holders)
        assert all(self._pool.num_holders(block) == count for block, count in holders.items())
        for request in requests:
            self._check_table(request, holders)

    def _check_table(self, request: Request, holders: Counter[int]) -> None:
        table = request.block_table
        assert len(set(table)) == len(table), "a table refers to a block twice"
        assert request.num_computed_tokens <= len(table) * self.block_size
        written = table[request.num_computed_tokens // self.block_size :]
        assert all(holders[block] == 1 for block in written), "a block that is written to is shared"

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
