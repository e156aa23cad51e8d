"""Steps whose logprobs are too many for one message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trioserve.core.step_result import StepResult

__all__ = ["split_step"]

_MAX_LOGPROBS = 2**20
"""Of one message, 12 MiB, unless a single request has more. The frontend sees to it that this is at most
192 MiB, which a frame holds."""


def split_step(result: StepResult) -> Iterator[StepResult]:
    """`result`, in as many parts as it needs; each request is in one of them."""
    if not _has_logprobs(result):  # nearly every step of nearly every server
        yield result
        return
    start = weight = 0
    for place, own in enumerate(_num_logprobs(result)):
        if place > start and weight + own > _MAX_LOGPROBS:
            yield _part(result, slice(start, place))
            start, weight = place, 0
        weight += own
    yield result if start == 0 else _part(result, slice(start, None))


def _has_logprobs(result: StepResult) -> bool:
    """A request asks for them for all of its tokens or for none, so the first one tells."""
    return any(result.prompt_logprobs) or any(
        tokens[0].logprobs is not None for tokens in result.sampled if tokens
    )


def _num_logprobs(result: StepResult) -> Sequence[int]:
    """By request."""
    return [
        sum(len(token.logprobs.token_ids) for token in tokens if token.logprobs is not None)
        + sum(len(row.token_ids) for row in prompt_rows)
        for tokens, prompt_rows in zip(result.sampled, result.prompt_logprobs, strict=True)
    ]


def _part(result: StepResult, requests: slice) -> StepResult:
    return attrs.evolve(
        result,
        request_ids=result.request_ids[requests],
        token_ids=result.token_ids[requests],
        sampled=result.sampled[requests],
        finish_reasons=result.finish_reasons[requests],
        stop_token_ids=result.stop_token_ids[requests],
        num_cached_tokens=result.num_cached_tokens[requests],
        prompt_logprobs=result.prompt_logprobs[requests],
        freed=() if requests.start else result.freed,
    )
