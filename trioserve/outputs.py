"""What a request gives back."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar, overload

import attrs

__all__ = [
    "REPETITION_DETECTED",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "FinishReason",
    "FlatLogprobs",
    "Logprob",
    "PooledRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TokenLogprobs",
]

REPETITION_DETECTED = "repetition_detected"
"""The `stop_reason` that goes with `FinishReason.REPETITION`."""


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
"""Of one position: token id -> Logprob. First the token that is there (sampled, or of the prompt), then the
most likely ones in falling order, then those that `SamplingParams.logprob_token_ids` names."""


@attrs.define(eq=False)
class FlatLogprobs(Sequence[TokenLogprobs]):
    """The logprobs of many positions in a few arrays, for `SamplingParams.flat_logprobs`.

    As a sequence it has one entry per position, made when it is asked for; a slice is a FlatLogprobs again.
    The arrays have every entry that was reported: a token may be twice among those of a position (sampled,
    and among the most likely ones), and counts once, in its first place, in what the sequence shows.
    """

    start_indices: array[int] = attrs.field(factory=lambda: array("q"))
    """int64 per position: where its entries begin in the arrays below. The
    first position of a prompt has none."""
    end_indices: array[int] = attrs.field(factory=lambda: array("q"))
    token_ids: array[int] = attrs.field(factory=lambda: array("i"))
    """int32."""
    logprobs: array[float] = attrs.field(factory=lambda: array("f"))
    """float32."""
    ranks: array[int] = attrs.field(factory=lambda: array("i"))
    """int32."""
    decoded_tokens: list[str] = attrs.field(factory=list)

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float], ranks: Sequence[int]) -> None:
        """Add a position. The caller extends `decoded_tokens` likewise."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | FlatLogprobs:
        if isinstance(index, slice):
            return self._sliced(index)
        position: dict[int, Logprob] = {}
        for entry in range(self.start_indices[index], self.end_indices[index]):
            logprob = Logprob(self.logprobs[entry], self.ranks[entry], self.decoded_tokens[entry])
            position.setdefault(self.token_ids[entry], logprob)
        return position

    def _sliced(self, index: slice) -> FlatLogprobs:
        sliced = FlatLogprobs()
        for start, end in zip(self.start_indices[index], self.end_indices[index], strict=True):
            own = slice(start, end)
            sliced.append(self.token_ids[own], self.logprobs[own], self.ranks[own])
            sliced.decoded_tokens += self.decoded_tokens[own]
        return sliced


@attrs.define
class CompletionOutput:
    """One completion: everything so far, or what is new, by the request's `output_kind`."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    """Of all tokens so far; None unless logprobs were asked for."""
    logprobs: Sequence[TokenLogprobs] | None = None
    """One entry per entry of `token_ids`; a FlatLogprobs if `flat_logprobs` was asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it, or "repetition_detected"; None for EOS and all else."""

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
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    """One entry per prompt token, the first None; a FlatLogprobs (the first entry empty) if `flat_logprobs`
    was asked for. None where none were asked for, or not all of them are there yet. Cumulative streams
    repeat them; in DELTA streams one output has them."""
    outputs: list[CompletionOutput]
    """Sorted by index. Before the end of a stream, only the completions that have something new."""
    finished: bool
    """True for the last output: every one of the n completions has ended."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    metrics: RequestMetrics | None = None


@attrs.frozen(kw_only=True)
class BeamSearchSequence:
    """One of the best continuations that a beam search has found."""

    tokens: Sequence[int]
    """The prompt's and the generated ones; an EOS that ended it only with `include_stop_str_in_output`."""
    output_token_ids: Sequence[int]
    """The generated ones of `tokens`."""
    text: str
    """Of `tokens`, without special tokens."""
    output_text: str
    """What `output_token_ids` add to the prompt's text."""
    logprobs: Sequence[TokenLogprobs]
    """Per generated token (with the EOS that ended it): its own, and those of the tokens it was chosen from,
    before the temperature acted."""
    cum_logprob: float
    """Of all generated tokens, with the EOS that ended it and with the search's temperature."""
    score: float
    """`cum_logprob` / number of generated tokens ** length_penalty; the EOS that ended it counts."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The EOS token that ended it; None where none did."""


@attrs.frozen(kw_only=True)
class BeamSearchOutput:
    """The result of a beam search."""

    request_id: str
    prompt: str | None
    """The prompt's text, None if it was given as token ids."""
    prompt_token_ids: Sequence[int]
    sequences: Sequence[BeamSearchSequence]
    """The best first; at most `beam_width`."""


@attrs.frozen(eq=False)
class PoolingOutput:
    """What was pooled of one text."""

    data: array[float]
    """float32: [num_values], or [num_tokens, num_values] row by row for the tasks token_...."""
    num_rows: int | None = None
    """num_tokens; None where there is one result for the whole text."""

    @property
    def num_values(self) -> int:
        """Of a row."""
        return len(self.data) if self.num_rows is None else len(self.data) // max(self.num_rows, 1)

    @property
    def shape(self) -> list[int]:
        """[num_values], or [num_tokens, num_values]."""
        return [self.num_values] if self.num_rows is None else [self.num_rows, self.num_values]

    def tolist(self) -> list[float] | list[list[float]]:
        """A list of numbers, or of one list per token."""
        if self.num_rows is None:
            return self.data.tolist()
        width = self.num_values
        return [self.data[row * width : (row + 1) * width].tolist() for row in range(self.num_rows)]


@attrs.frozen(eq=False)
class EmbeddingOutput:
    """A text as a vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@attrs.frozen(eq=False)
class ClassificationOutput:
    """How likely each label is; or its raw value, without the activation."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@attrs.frozen(eq=False)
class ScoringOutput:
    """How well two texts fit."""

    score: float


Pooled = TypeVar("Pooled")


@attrs.frozen(kw_only=True, eq=False)
class PooledRequestOutput(Generic[Pooled]):
    """The result of a request for pooling."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: Sequence[int]
    """Of a pair of texts, both."""
    num_cached_tokens: int = 0
    finished: bool = True


@attrs.frozen(kw_only=True, eq=False)
class PoolingRequestOutput(PooledRequestOutput[PoolingOutput]):
    """Of `encode`."""


@attrs.frozen(kw_only=True, eq=False)
class EmbeddingRequestOutput(PooledRequestOutput[EmbeddingOutput]):
    """Of `embed`."""


@attrs.frozen(kw_only=True, eq=False)
class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]):
    """Of `classify`."""


@attrs.frozen(kw_only=True, eq=False)
class ScoringRequestOutput(PooledRequestOutput[ScoringOutput]):
    """Of `score`."""
