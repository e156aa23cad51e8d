"""Requests without a scheduler, and a KV cache whose blocks remember what was written into them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trioserve.core.kv_cache import KVCacheManager
from trioserve.core.request import Request
from trioserve.sampling_params import SamplingParams
from trioserve.token_constraints import TokenConstraints
from trioserve.worker.kv_layout import NULL_BLOCK, KVCacheLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def make_request(prompt: Iterable[int], *, request_id: int = 0, **fields: object) -> Request:
    prompt = list(prompt)
    values: dict[str, object] = {
        "request_id": request_id,
        "prompt_token_ids": prompt,
        "params": SamplingParams(),
        "constraints": TokenConstraints(),
        "seed": 0,
        "streams": True,
        "priority": 0,
        "deadline": math.inf,
        "grammar": None,
        "cache_salt": None,
        "lora": None,
        "multimodal_keys": (),
        "audio": None,
        "arrival": 0,
        "eos_token_ids": frozenset(),
        "stop_token_ids": frozenset(),
        "max_known_tokens": 10**6,
        "prompt_logprobs_start": len(prompt),
    }
    return Request(**{**values, **fields})  # type: ignore[arg-type]


class Cache:
    """A manager, and the memory that it manages: each place holds all tokens up to its own, as keys and
    values depend on those. Every operation is followed by `check`, and every token by a look at what its
    window reaches."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        windows: Sequence[int | None] = (None,),
        block_size: int = 4,
        **options: object,
    ) -> None:
        self.layout = KVCacheLayout(block_size=block_size, windows=tuple(windows))
        self.manager = KVCacheManager(num_blocks, self.layout, **options)  # type: ignore[arg-type]
        self.holders: list[Request] = []
        self._memory: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}

    @property
    def num_free(self) -> int:
        return self.manager.statistics().num_free

    def admit(self, request: Request, num_tokens: int | None = None) -> bool:
        """For a first step of `num_tokens`, or of all that is not cached."""
        cached = self.manager.find_cached(request)
        assert cached.num_tokens < request.num_known_tokens
        end = request.num_known_tokens
        if num_tokens is not None:
            end = min(end, cached.num_tokens + num_tokens)
        admitted = self.manager.admit(request, cached, end)
        if admitted:
            self.holders.append(request)
        self.manager.check(self.holders)
        return admitted

    def extend(self, request: Request, num_tokens: int) -> bool:
        extended = self.manager.extend(request, num_tokens)
        self.manager.check(self.holders)
        return extended

    def compute(self, request: Request, num_tokens: int, drafts: Sequence[int] = ()) -> None:
        """One step: writes that many known tokens, and drafts that turn out wrong. Blocks must be there."""
        start = request.num_computed_tokens
        end = start + num_tokens
        tokens = [*request.tokens(0, end), *drafts]
        for group in range(len(self.layout.windows)):
            for position in range(start, len(tokens)):
                self._memory[self._place(request, group, position)] = group, tuple(tokens[: position + 1])
        for position in range(start, end):
            self._look_back(request, position, tokens)
        request.num_computed_tokens = end
        self.manager.advance(request)
        self.manager.check(self.holders)

    def _place(self, request: Request, group: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.layout.block_size)
        block = request.block_tables[group][index]
        assert block != NULL_BLOCK, f"position {position} of group {group} has no block"
        return block, offset

    def _look_back(self, request: Request, position: int, tokens: Sequence[int]) -> None:
        for group, window in enumerate(self.layout.windows):
            first = 0 if window is None else max(0, position - window + 1)
            for seen in range(first, position + 1):
                content = self._memory[self._place(request, group, seen)]
                assert content == (group, tuple(tokens[: seen + 1])), (
                    "a block was overwritten, or is not ours"
                )

    def free(self, request: Request) -> None:
        self.manager.free(request)
        self.holders.remove(request)
        self.manager.check(self.holders)

    def run(self, prompt: Sequence[int], **fields: object) -> int:
        """A request of its own from beginning to end; how many of its tokens were cached."""
        request = make_request(prompt, **fields)
        assert self.admit(request)
        num_cached = request.num_computed_tokens
        self.compute(request, request.num_known_tokens - num_cached)
        self.free(request)
        return num_cached
