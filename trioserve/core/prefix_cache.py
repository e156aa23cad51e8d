"""Finds the KV blocks of a prompt's beginning that an earlier request has computed."""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.core.block_pool import BlockPool
    from trioserve.core.request import Request

__all__ = ["PrefixCache", "block_hash", "root_hash"]

_DIGEST_BYTES = 16


def root_hash(*keys: str | None) -> bytes:
    """What the chain of a request starts from: everything but tokens that its KV content depends on.

    The chain carries it to every block. `repr` of the tuple, because no two tuples of strings and None have
    the same one, and it is the same in every process.
    """
    return hashlib.blake2b(repr(keys).encode(), digest_size=_DIGEST_BYTES).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Names a full block by its tokens and, through its parent's hash, all tokens before them.

    128 bits of BLAKE2b over the parent and the token ids as int32. It must be a cryptographic hash, since
    whoever could find a second prompt with the same hash would be answered from another one's cache.
    """
    return hashlib.blake2b(parent + array("i", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


class PrefixCache:
    """Names full blocks by their content, and finds them by it; the pool keeps the names.

    Only full blocks have a name. So a block that is still written to, the last one of a sequence, is never
    shared, and nothing ever has to be copied before a write.
    """

    def __init__(self, pool: BlockPool, block_size: int, model: str) -> None:
        self._pool = pool
        self._block_size = block_size
        self._model = model

    def find(self, request: Request) -> list[int]:
        """The longest known beginning of a request, as blocks; changes nothing.

        It ends before the last known token even if that is known too, because to sample the next token at
        least one has to be computed.
        """
        num_blocks = (request.num_known_tokens - 1) // self._block_size
        blocks = []
        for content in self._hashes(request, num_blocks):
            block = self._pool.find(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, request: Request) -> None:
        """Let others find the blocks of a request that have become full and computed."""
        num_blocks = request.num_computed_tokens // self._block_size
        hashes = self._hashes(request, num_blocks)
        for index in range(request.num_published_blocks, num_blocks):
            self._pool.publish(request.block_table[index], hashes[index])
        request.num_published_blocks = num_blocks

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Of the first `num_blocks` blocks. Each is computed once in a request's life, preempted or not."""
        hashes = request.block_hashes
        while len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else root_hash(self._model, request.cache_salt)
            start = len(hashes) * self._block_size
            hashes.append(block_hash(parent, request.tokens(start, start + self._block_size)))
        return hashes[:num_blocks]
