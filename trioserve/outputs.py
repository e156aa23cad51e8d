"""What a request gives back."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import attrs

__all__ = ["CompletionOutput", "FinishReason", "Logprob", "RequestMetrics", "RequestOutput", "TokenLogprobs"]


class FinishReason(enum.IntEnum):
    """Why a completion ended. The order is the wire format; `str()` gives the public spelling."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    REPETITION = 5
    """It said the same again and again (`SamplingParams.repetition_detection`)."""
    DEADLINE = 6
    """The deadline of the request's cancel scope passed before it could be run to its end."""

    def __str__(self) -> str:
        return self.name.lower()


@attrs.frozen
class Logprob:
    """Natural log of a token's probability before any sampling parameter acted on it."""

    logprob: float
    rank: int
    """1 is the most likely token of the vocabulary."""
    decoded_token: str
    """The token alone as text; bytes that are no whole character show as U+FFFD."""


TokenLogprobs = Mapping[int, Logprob]
"""Of one position: token id -> Logprob, the sampled token first, then the most likely ones in order."""


@attrs.define
class CompletionOutput:
    """One completion: everything so far, or what is new, by the request's `output_kind`."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    """Of all tokens so far; None unless logprobs were asked for."""
    logprobs: Sequence[TokenLogprobs] | None = None
    """One entry per entry of `token_ids`."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for EOS, length and abort."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@attrs.frozen(kw_only=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.monotonic()`; None where it did not get that far."""

    arrival_time: float
    first_token_time: float | None
    """None, too, where nothing travels before the end."""
    last_token_time: float | None
    num_generation_tokens: int


@attrs.define(kw_only=True)
class RequestOutput:
    """One item of a stream, or the whole result."""

    request_id: str
    prompt: str | None
    """The prompt's text, None if it was given as token ids."""
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    """Sorted by index. Before the end of a stream, only the completions that have something new."""
    finished: bool
    """True for the last output: every one of the n completions has ended."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    metrics: RequestMetrics | None = None
