"""How a model's layers share out the paged KV cache. Imports no torch."""

from __future__ import annotations

import attrs

__all__ = ["NULL_BLOCK", "KVCacheLayout"]

NULL_BLOCK = -1
"""Stands in a block table for a block that the window of its group has left behind. No layer looks at it."""


@attrs.frozen(kw_only=True)
class KVCacheLayout:
    """Layers that see equally far back form a group, or several of equal size; each group has a block table.

    All groups draw from one pool of equal blocks: a block holds the keys and values of `block_size` tokens in
    all layers of one group. A model whose layers all see everything has one group, and its one table is what
    is called a block table elsewhere.
    """

    block_size: int
    """Tokens per block."""
    windows: tuple[int | None, ...] = (None,)
    """One entry per group: how many tokens its layers see, the newest included; None: all of them."""

    def first_needed_block(self, group: int, num_computed_tokens: int) -> int:
        """The first block that the token at position `num_computed_tokens`, or a later one, looks at."""
        window = self.windows[group]
        if window is None:
            return 0
        return max(0, num_computed_tokens - window + 1) // self.block_size

    def max_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` ever needs, if a step computes at most
        `step_tokens` of it: what a pool must have so that the sequence alone always fits."""
        whole = -(-num_tokens // self.block_size)
        # Up to window - 1 tokens before those of the step, and a block that both ends of the span cut.
        spans = [
            whole if w is None else -(-(w - 1 + step_tokens) // self.block_size) + 1 for w in self.windows
        ]
        return sum(min(whole, span) for span in spans)
