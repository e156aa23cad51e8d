"""From what a client asks for to a request that can be scheduled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.core.request import Request

if TYPE_CHECKING:
    from trioserve.core.request import CoreRequest

__all__ = ["RequestLimits", "to_request"]


@attrs.frozen(kw_only=True)
class RequestLimits:
    """What every request of a model is subject to."""

    max_model_len: int
    eos_token_ids: frozenset[int]


def to_request(new: CoreRequest, limits: RequestLimits, *, arrival: int) -> Request:
    """The state of a new request.

    Raises:
      ValueError: `max_tokens` is not set, or the prompt is empty or leaves no room for a token.
    """
    prompt = list(new.prompt_token_ids)
    if not 0 < len(prompt) < limits.max_model_len:
        raise ValueError(
            f"the prompt must have 1 to {limits.max_model_len - 1} tokens (one less than max_model_len), "
            f"got {len(prompt)}"
        )
    if new.params.max_tokens is None:
        raise ValueError("max_tokens must be set")
    eos_token_ids = frozenset() if new.params.ignore_eos else limits.eos_token_ids
    return Request(
        request_id=new.request_id,
        prompt_token_ids=prompt,
        params=new.params,
        constraints=new.constraints,
        seed=new.seed,
        streams=new.streams,
        priority=new.priority,
        deadline=new.deadline,
        grammar=new.grammar,
        cache_salt=new.cache_salt,
        lora=new.lora,
        multimodal_keys=new.multimodal_keys,
        audio=new.audio,
        arrival=arrival,
        eos_token_ids=eos_token_ids,
        stop_token_ids=eos_token_ids.union(new.params.stop_token_ids),
        max_known_tokens=min(len(prompt) + new.params.max_tokens, limits.max_model_len),
        # The first token has none: nothing comes before it.
        prompt_logprobs_start=len(prompt) if new.params.prompt_logprobs is None else 1,
    )
