"""Finds the KV blocks of a prompt's beginning that an earlier request has computed."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING

import attrs

from trioserve.worker.kv_layout import NULL_BLOCK

if TYPE_CHECKING:
    from trioserve.core.block_pool import BlockPool
    from trioserve.core.request import MultimodalKey, Request
    from trioserve.worker.kv_layout import KVCacheLayout

__all__ = ["CachedPrefix", "PrefixCache", "block_hash", "multimodal_content", "root_hash"]

_DIGEST_BYTES = 16


@attrs.frozen(kw_only=True)
class CachedPrefix:
    """The beginning of a request that is in the KV cache."""

    num_tokens: int
    """A multiple of the block size, and less than the request's known tokens."""
    blocks: Sequence[Sequence[int]]
    """Per group of layers, one entry per block of the prefix; NULL_BLOCK where the window does not reach."""


def root_hash(*keys: str | None) -> bytes:
    """What the chain of a request starts from: everything but tokens that its KV content depends on.

    The chain carries it to every block. `repr` of the tuple, because no two tuples of strings and None have
    the same one, and it is the same in every process.
    """
    return hashlib.blake2b(repr(keys).encode(), digest_size=_DIGEST_BYTES).digest()


def block_hash(parent: bytes, token_ids: Sequence[int], multimodal: bytes = b"") -> bytes:
    """Names a full block by its tokens and, through its parent's hash, all tokens before them.

    128 bits of BLAKE2b over the parent, the token ids as int32, and what placeholders among them stand for.
    It must be a cryptographic hash, since whoever could find a second prompt with the same hash would be
    answered from another one's cache.
    """
    content = parent + array("i", token_ids).tobytes() + multimodal
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def multimodal_content(keys: Sequence[MultimodalKey], start: int, stop: int) -> bytes:
    """What the placeholders at the positions [start, stop) stand for; empty if there are none.

    `keys` are sorted by position and do not overlap. A key counts from the block's own start, so that the
    same picture one token later, or its first part in place of its second, gives something else.
    """
    inside = []
    for index in range(bisect_right(keys, start, key=_end), len(keys)):
        key = keys[index]
        if key.position >= stop:
            break
        inside.append((key.position - start, key.length, key.digest))
    return repr(inside).encode() if inside else b""


def _end(key: MultimodalKey) -> int:
    return key.position + key.length


class PrefixCache:
    """Names full blocks by their content, and finds them by it; the pool keeps the names.

    Only full blocks have a name. So a block that is still written to, the last one of a sequence, is never
    shared, and nothing ever has to be copied before a write.

    A request has one chain of hashes, whatever the number of groups: a block's content is its group and the
    hash of all tokens up to its end.
    """

    def __init__(self, pool: BlockPool, layout: KVCacheLayout, model: str) -> None:
        self._pool = pool
        self._layout = layout
        self._model = model
        windows = dict(enumerate(layout.windows))
        self._full_groups = [group for group, window in windows.items() if window is None]
        self._window_groups = [group for group, window in windows.items() if window is not None]
        # The one that looks back farthest; it has the first block that anyone needs.
        self._widest_group = max(self._window_groups, key=lambda group: windows[group] or 0, default=None)

    def hash_prompt(self, request: Request) -> None:
        """Do now what would take `find` most of its time."""
        self._hash_blocks(request, self._max_found(request))

    def find(self, request: Request) -> CachedPrefix:
        """The longest beginning of a request from which it can go on; changes nothing but its hashes.

        It ends before the last known token even if that is known too, because to sample the next token at
        least one has to be computed.

        A group that sees everything must have all blocks of the prefix; a window group only those that the
        token behind the prefix looks at, for all before that is needed by nobody:

            full group     |....|....|....|....|
            window of 6              |..++|++++|^      + what the next token, ^, sees
        """
        num_blocks = self._max_found(request)
        self._hash_blocks(request, num_blocks)
        hashes = request.block_hashes[:num_blocks]
        full = {group: self._leading_blocks(group, hashes) for group in self._full_groups}
        num_blocks = min(map(len, full.values()), default=num_blocks)
        num_blocks = self._fit_windows(hashes, num_blocks)
        blocks = [
            full[group][:num_blocks] if group in full else self._window_blocks(group, hashes[:num_blocks])
            for group in range(len(self._layout.windows))
        ]
        return CachedPrefix(num_tokens=num_blocks * self._layout.block_size, blocks=blocks)

    def _max_found(self, request: Request) -> int:
        return (request.num_known_tokens - 1) // self._layout.block_size

    def _leading_blocks(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        return self._pool.find_leading(zip(repeat(group), hashes, strict=False))

    def _fit_windows(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """The longest prefix of at most `num_blocks` for which every window group has what it needs.

        From the right, each block is looked for once: if one is missing, no prefix that needs it will do, and
        every prefix of more blocks than those before it needs it, as windows move right with the end.
        """
        if self._widest_group is None:
            return num_blocks
        index = num_blocks
        while index > self._first_needed(self._widest_group, num_blocks):
            index -= 1
            if not self._windows_have(hashes[index], index, num_blocks):
                num_blocks = index
        return num_blocks

    def _windows_have(self, content: bytes, index: int, num_blocks: int) -> bool:
        """All groups that need this block if the prefix has `num_blocks` have it."""
        return all(
            self._pool.find((group, content)) is not None
            for group in self._window_groups
            if index >= self._first_needed(group, num_blocks)
        )

    def _window_blocks(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        first = self._first_needed(group, len(hashes))
        return [NULL_BLOCK] * first + self._leading_blocks(group, hashes[first:])

    def _first_needed(self, group: int, num_blocks: int) -> int:
        return self._layout.first_needed_block(group, num_blocks * self._layout.block_size)

    def publish(self, request: Request) -> None:
        """Let others find the blocks of a request that have become full and computed."""
        num_blocks = request.num_computed_tokens // self._layout.block_size
        self._hash_blocks(request, num_blocks)
        for index in range(request.num_published_blocks, num_blocks):
            content = request.block_hashes[index]
            for group, table in enumerate(request.block_tables):
                self._pool.publish(table[index], (group, content))
        request.num_published_blocks = num_blocks

    def _hash_blocks(self, request: Request, num_blocks: int) -> None:
        """Of at least the first `num_blocks`. Each is computed once in a request's life, preempted or not."""
        hashes = request.block_hashes
        size = self._layout.block_size
        while len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else root_hash(self._model, request.lora, request.cache_salt)
            start = len(hashes) * size
            token_ids = request.tokens(start, start + size)
            if request.multimodal_keys:
                multimodal = multimodal_content(request.multimodal_keys, start, start + size)
                hashes.append(block_hash(parent, token_ids, multimodal))
            else:
                hashes.append(block_hash(parent, token_ids))
