"""POST /inference/v1/generate: token ids in, token ids out; and what a rendered request says.

The request has the names of vLLM's, so that what /v1/completions/render and /v1/chat/completions/render
answer can be sent here, or to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import attrs

from trioserve.outputs import TokenLogprobs
from trioserve.sampling_params import RepetitionDetection, RequestOutputKind, SamplingParams
from trioserve.server.protocol.chat import ChatLogprobs
from trioserve.server.protocol.reading import Problem, RequestReader
from trioserve.server.protocol.refusals import Refusal
from trioserve.server.protocol.sampling import StreamOptions
from trioserve.server.protocol.usage import Usage
from trioserve.structured_outputs import StructuredOutputsParams
from trioserve.validators import number, optional

__all__ = [
    "GENERATE_READER",
    "GenerateRequest",
    "Generated",
    "GeneratedChoice",
    "GeneratedChunk",
    "RenderedRequest",
    "TokenSampling",
]


@attrs.frozen(kw_only=True)
class TokenSampling:
    """As `trioserve.sampling_params.SamplingParams` has them; null is the default.

    The model's own defaults do not act here.
    """

    n: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    """Null: as many as the context has room for."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    """For stop strings: they are looked for in the text."""
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetection | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_args: dict[str, Any] | None = None
    """For custom logits processors."""

    def __attrs_post_init__(self) -> None:
        self.params(stream=False)

    @classmethod
    def of(cls, params: SamplingParams) -> Self:
        """The same that these say."""
        values = {field.name: getattr(params, field.name) for field in attrs.fields(cls)}
        given: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
        }
        if params.logit_bias is not None:
            given["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        return cls(**given)

    def params(self, *, stream: bool) -> SamplingParams:
        """
        Raises:
          InvalidRequestError: a value is out of range, or contradicts another.
        """
        values = {field.name: getattr(self, field.name) for field in attrs.fields(type(self))}
        return SamplingParams(
            **{
                "max_tokens": None,
                "detokenize": bool(self.stop),
                "output_kind": RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
                **{name: value for name, value in values.items() if value is not None},
            }
        )


@attrs.frozen(kw_only=True)
class GenerateRequest:
    token_ids: list[int]
    sampling_params: TokenSampling = attrs.field(factory=TokenSampling)
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout: float | None = None
    """Seconds that the request may take, from its headers to its last token."""

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def field_names(self) -> dict[str, str]:
        names = {field.name: f"sampling_params.{field.name}" for field in attrs.fields(TokenSampling)}
        return names | {"prompt": "token_ids", "json": "sampling_params.structured_outputs"}


@attrs.define(kw_only=True)
class GeneratedChoice:
    index: int
    token_ids: Sequence[int]
    """Of a chunk, those that are new."""
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    """Null until the end."""
    stop_reason: int | str | None


@attrs.define(kw_only=True)
class Generated:
    request_id: str
    model: str
    created: int
    choices: list[GeneratedChoice]
    usage: Usage
    prompt_logprobs: Sequence[TokenLogprobs | None] | None
    kv_transfer_params: None = None


@attrs.define(kw_only=True)
class GeneratedChunk:
    request_id: str
    model: str
    created: int
    choices: list[GeneratedChoice]
    """One, or none beside the usage at the end."""
    usage: Usage | None


@attrs.frozen(kw_only=True)
class RenderedRequest:
    """What the engine would be asked for."""

    request_id: str
    model: str
    prompt: str | None
    """Null if the prompt was given as token ids, or was cut."""
    token_ids: Sequence[int]
    sampling_params: TokenSampling
    stream: bool
    stream_options: StreamOptions | None
    priority: int
    cache_salt: str | None


def _conflicts(request: GenerateRequest) -> list[Problem]:
    problems = []
    if not request.token_ids:
        problems.append(Problem("token_ids", "token_ids must hold at least one token id, got []."))
    if request.stream_options is not None and not request.stream:
        problems.append(Problem("stream_options", "stream_options is only allowed when stream is true."))
    if request.cache_salt is not None and not request.cache_salt:
        problems.append(Problem("cache_salt", "cache_salt must be a non-empty string, got ''."))
    if request.stream and request.sampling_params.prompt_logprobs is not None:
        path = "sampling_params.prompt_logprobs"
        problems.append(Problem(path, f"{path} is only allowed when stream is false."))
    return problems


GENERATE_READER = RequestReader(
    kind=GenerateRequest,
    ranges={
        "timeout": attrs.fields_dict(SamplingParams)["temperature"].evolve(
            name="timeout", validator=optional(number("a number of seconds > 0", above=0))
        )
    },
    refusals=(Refusal("features", "null"), Refusal("kv_transfer_params", "null or empty", ({},))),
    shapes={"token_ids": {"minItems": 1}, "cache_salt": {"minLength": 1}},
    conflicts=_conflicts,
)
