"""The blocks of the KV cache: who holds which, and which is given out next."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, TypeAlias

import attrs

from trioserve.core.stats import CacheEvents

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["BlockContent", "BlockPool", "BlockPoolStatistics"]

BlockContent: TypeAlias = tuple[int, bytes]
"""What a block holds: keys and values in the layers of this group, of the tokens with this hash."""


@attrs.frozen(kw_only=True)
class BlockPoolStatistics:
    num_blocks: int
    num_free: int
    """Held by nobody; those among them with known content are still found by it."""
    num_named: int
    """Blocks that can be found by their content, held or free."""


class BlockPool:
    """Counts the holders of each block, and finds blocks by their content.

    A block that loses its last holder becomes free but keeps its content: whoever looks for that may hold it
    again (`share`), until `take` gives it out for new content. Free blocks are given out in this order: first
    those with unknown content, as nothing is lost with them, then those that were released longest ago.

    An OrderedDict is the free list because it is a linked list with a key index, in C: append, take from
    either end and remove from the middle all cost the same whatever its size.
    """

    # Invariants, checked by check() (tests/test_kv_cache_groups.py calls it after every operation):
    # - a block is in _free if and only if its _num_holders is 0;
    # - _block_of_content and _content_of_block are inverse to each other;
    # - in _free, blocks of unknown content come before all others.

    def __init__(self, num_blocks: int) -> None:
        self._num_holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of_content: dict[BlockContent, int] = {}
        self._content_of_block: dict[int, BlockContent] = {}
        self._num_stored = self._num_evicted = self._num_resets = 0

    @property
    def num_blocks(self) -> int:
        return len(self._num_holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_holders(self, block: int) -> int:
        return self._num_holders[block]

    def is_named(self, block: int) -> bool:
        """It can be found by its content."""
        return block in self._content_of_block

    def take(self, count: int) -> list[int]:
        """`count` blocks for new content, each with one holder; there must be that many free ones."""
        assert count <= len(self._free), f"{count} blocks taken, {len(self._free)} free"
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        block, _ = self._free.popitem(last=False)
        content = self._content_of_block.pop(block, None)
        if content is not None:
            del self._block_of_content[content]
            self._num_evicted += 1
        self._num_holders[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each; their content must be known, so that it stays as it is."""
        for block in blocks:
            assert block in self._content_of_block, (
                f"block {block} is shared, but its content may still change"
            )
            if self._num_holders[block] == 0:
                del self._free[block]
            self._num_holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each. Of those that become free, the first will be given out first."""
        for block in blocks:
            assert self._num_holders[block] > 0, f"block {block} is released, but nobody holds it"
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free[block] = None
                if block not in self._content_of_block:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, content: BlockContent) -> None:
        """Let a block be found by its content, which from now on must not change.

        If another block with this content is known, that one stays the one to be found: the two are the
        same, and tables that refer to either remain as they are.
        """
        assert self._num_holders[block] > 0, f"block {block} is published, but nobody holds it"
        assert block not in self._content_of_block, f"block {block} is published twice"
        if content not in self._block_of_content:
            self._block_of_content[content] = block
            self._content_of_block[block] = content
            self._num_stored += 1

    def find(self, content: BlockContent) -> int | None:
        """The block with this content. It may be free, so `share` it before anything is taken."""
        return self._block_of_content.get(content)

    def find_leading(self, contents: Iterable[BlockContent]) -> list[int]:
        """The blocks with these contents, up to the first content that no block has; see `find`."""
        blocks: list[int] = []
        for content in contents:
            block = self._block_of_content.get(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def forget_contents(self) -> bool:
        """Make every block's content unknown; False, and nothing done, while any block is held."""
        if len(self._free) < self.num_blocks:
            return False
        self._block_of_content.clear()
        self._content_of_block.clear()
        self._num_resets += 1
        return True

    def take_events(self) -> CacheEvents:
        """What became of contents since the last call."""
        events = CacheEvents(
            num_stored=self._num_stored, num_evicted=self._num_evicted, num_resets=self._num_resets
        )
        self._num_stored = self._num_evicted = self._num_resets = 0
        return events

    def statistics(self) -> BlockPoolStatistics:
        return BlockPoolStatistics(
            num_blocks=self.num_blocks, num_free=self.num_free, num_named=len(self._block_of_content)
        )

    def check(self) -> None:
        """Assert the invariants, in time linear in the number of blocks."""
        assert all(count >= 0 for count in self._num_holders)
        unheld = {block for block, count in enumerate(self._num_holders) if count == 0}
        assert unheld == set(self._free)
        assert self._block_of_content == {content: block for block, content in self._content_of_block.items()}
        assert len(self._block_of_content) == len(self._content_of_block)
        named = [block in self._content_of_block for block in self._free]
        assert named == sorted(named)
