"""What a step has to report, ready for the link."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import attrs

from trioserve.outputs import FinishReason
from trioserve.worker.batch import LogprobRow, SampledToken

if TYPE_CHECKING:
    from trioserve.core.request import Request

__all__ = ["StepResult"]


@attrs.frozen(kw_only=True, eq=False)
class StepResult:
    """What a step gave: parallel lists with one entry per request that has something to report."""

    request_ids: Sequence[int] = ()
    token_ids: Sequence[Sequence[int]] = ()
    """Tokens not reported before: one of a request that streams, all of one that does not."""
    sampled: Sequence[Sequence[SampledToken]] = ()
    """The same tokens, with their logprobs if those were asked for."""
    finish_reasons: Sequence[FinishReason | None] = ()
    """None while the request runs."""
    stop_token_ids: Sequence[int | None] = ()
    """The request's own stop token that ended it; EOS is none."""
    completed_grammars: Collection[int] = ()
    """Ids of requests that ended because their grammar lets nothing follow: the last token is text, and none
    that stops."""
    num_cached_tokens: Sequence[int] = ()
    """Prompt tokens found in the prefix cache when the request was first scheduled."""

    prompt_logprobs: Sequence[Sequence[LogprobRow]] = ()
    """Of the prompt's tokens from the second on: all of them with the request's first entry."""
    failures: Sequence[str] = ()
    """Why requests have ended with FinishReason.ERROR, for the log."""
    freed: Sequence[int] = ()
    """Ids of aborted requests whose blocks are free now, or that had none: each id that was aborted, once."""

    @classmethod
    def failure(cls, request_id: int) -> StepResult:
        """Of a request that the core could not even begin with."""
        return cls(
            request_ids=[request_id],
            token_ids=[[]],
            sampled=[[]],
            finish_reasons=[FinishReason.ERROR],
            stop_token_ids=[None],
            num_cached_tokens=[0],
            prompt_logprobs=[[]],
        )

    @classmethod
    def of(cls, requests: Sequence[Request], freed: Sequence[int] = ()) -> StepResult:
        """Takes over what these requests have not reported yet."""
        sampled = [request.take_unreported() for request in requests]
        return cls(
            request_ids=[request.request_id for request in requests],
            token_ids=[[token.token_id for token in tokens] for tokens in sampled],
            sampled=sampled,
            finish_reasons=[request.finish_reason for request in requests],
            stop_token_ids=[request.stop_token_id for request in requests],
            completed_grammars=[r.request_id for r in requests if r.has_completed_grammar],
            num_cached_tokens=[request.num_cached_tokens for request in requests],
            prompt_logprobs=[request.take_unreported_prompt_logprobs() for request in requests],
            failures=[f"request {r.request_id}: {r.failure}" for r in requests if r.failure is not None],
            freed=freed,
        )
