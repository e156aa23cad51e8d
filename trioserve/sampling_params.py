"""How one request is to be sampled, stopped and reported."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.json_values import json_object
from trioserve.structured_outputs import StructuredOutputsParams
from trioserve.validators import (
    HIGHEST_COUNT,
    Check,
    accepts,
    at_most,
    boolean,
    integer,
    non_empty_strings,
    number,
    one_of_class,
    optional,
    plain,
    reject,
    shown,
    to_strings,
    to_tuple,
    token_ids,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["GREEDY_BELOW", "RepetitionDetection", "RequestOutputKind", "SamplingParams"]

GREEDY_BELOW = 1e-5
"""Temperatures below this pick the most likely token."""

_MAX_LOGPROB_TOKEN_IDS = 128

# What costs something in each step, per item and sequence, and so would hold up everybody's.
_MAX_STOP_STRINGS = 64
_MAX_STOP_TOKENS = 1024
_MAX_BIASES = 1024
_MAX_BAD_WORDS = 1024

_MAX_CHARACTERS = 2**15
"""Of all stop strings, and of all bad words."""

_MAX_ALLOWED_TOKENS = 2**20
"""More than any vocabulary has; they cost nothing once a sequence runs."""


class RequestOutputKind(enum.IntEnum):
    """What each output of a stream carries."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """What is new since the output before."""
    FINAL_ONLY = 2
    """One output, at the end; nothing travels before it."""


def _to_logit_bias(value: Any) -> Any:
    """Keys may be numerals, as JSON has no integer keys; values are clamped to +-100 (OpenAI's range)."""
    if value is None or (isinstance(value, dict) and not value):
        return None
    try:
        return {_to_token_id(token): min(100.0, max(-100.0, float(bias))) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise InvalidRequestError(
            f"logit_bias must map token ids (integers) to numbers, got {shown(value)}.",
            parameter="logit_bias",
        ) from None


def _to_token_id(token: object) -> int:
    if isinstance(token, str) and not (token.isascii() and token.isdigit()):
        raise ValueError("no numeral, as far as JSON is concerned")
    if isinstance(token, bool) or not isinstance(token, int | str):
        raise TypeError("neither an integer nor a numeral")
    return int(token)


@accepts(propertyNames={"pattern": "^[0-9]+$"})
def _logit_bias(_: object, attribute: attrs.Attribute[Any], value: dict[int, float] | None) -> None:
    for token, bias in (value or {}).items():
        if not 0 <= token <= HIGHEST_COUNT or math.isnan(bias):
            raise reject(attribute, {token: bias}, "a map of token ids (integers >= 0) to numbers")


def _words(limit: int, what: str) -> Check:
    """A validator for strings that are looked for in each step."""

    def validate(instance: object, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
        non_empty_strings(instance, attribute, value)
        if (size := sum(map(len, value))) > _MAX_CHARACTERS:
            raise InvalidRequestError(
                f"{attribute.name} must have at most {_MAX_CHARACTERS} characters in all, got {size}.",
                parameter=attribute.name,
            )

    schema = {**non_empty_strings.schema, "maxLength": _MAX_CHARACTERS}
    return at_most(limit, what, Check(validate, schema))


def _to_optional_tuple(value: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if value is None else to_tuple(value)


@accepts(**token_ids.schema, minItems=1)
def _allowed_token_ids(
    instance: object, attribute: attrs.Attribute[Any], value: tuple[int, ...] | None
) -> None:
    if value is not None:
        token_ids(instance, attribute, value)
        if not value:
            raise reject(attribute, [], "null or a non-empty list of token ids")


def _number(default: float, allowed: str, **bounds: float) -> Any:
    return attrs.field(default=default, converter=plain, validator=number(allowed, **bounds))


def _integer(default: int, allowed: str, **bounds: int) -> Any:
    return attrs.field(default=default, converter=plain, validator=integer(allowed, **bounds))


def _optional_integer(allowed: str, default: int | None = None, **bounds: int) -> Any:
    return attrs.field(default=default, converter=plain, validator=optional(integer(allowed, **bounds)))


def _penalty() -> Any:
    return _number(0.0, "a number from -2 to 2", least=-2, most=2)


def _num_logprobs() -> Any:
    return _optional_integer("an integer >= 0, or -1 for all tokens", least=-1)


def _to_output_kind(value: Any) -> RequestOutputKind:
    if isinstance(value, int) and not isinstance(value, bool) and value in list(RequestOutputKind):
        return RequestOutputKind(value)
    kinds = ", ".join(f"{kind.name} ({kind.value})" for kind in RequestOutputKind)
    raise InvalidRequestError(
        f"output_kind must be one of {kinds}, got {shown(value)}.", parameter="output_kind"
    )


@attrs.frozen(kw_only=True)
class RepetitionDetection:
    """End a completion (finish reason "repetition") whose last tokens are one pattern, over and over."""

    max_pattern_size: int = attrs.field(
        converter=plain, validator=integer("an integer from 1 to 1024", least=1, most=1024)
    )
    """Tokens of the longest pattern that is looked for."""
    min_pattern_size: int = _integer(1, "an integer from 1 to 1024", least=1, most=1024)
    min_count: int = _integer(2, "an integer >= 2", least=2)
    """How many times in a row it must occur."""

    def __attrs_post_init__(self) -> None:
        if self.min_pattern_size > self.max_pattern_size:
            raise InvalidRequestError(
                f"min_pattern_size must be at most max_pattern_size ({self.max_pattern_size}), "
                f"got {self.min_pattern_size}.",
                parameter="min_pattern_size",
            )


@attrs.frozen(kw_only=True)
class SamplingParams:
    """Validated at construction: a wrong value raises `InvalidRequestError`, which names the field.

    The order in which they act, per token: raw logprobs are taken; then the mask of `structured_outputs` and
    `allowed_token_ids`, `bad_words`, `min_tokens` and `logit_bias`, penalties, custom logits processors,
    `thinking_token_budget`, temperature, `min_p`, `top_k`, `top_p`, and the draw.
    """

    n: int = _integer(1, "an integer from 1 to 128", least=1, most=128)
    """Completions per prompt."""
    presence_penalty: float = _penalty()
    """Subtracted once from the logit of every token that was generated already."""
    frequency_penalty: float = _penalty()
    """Subtracted from a token's logit once per time it was generated."""
    repetition_penalty: float = _number(1.0, "a number from 0.01 to 10", least=0.01, most=10)
    """Divides positive and multiplies negative logits of every token in prompt or output. Its lower bound
    keeps them finite."""
    temperature: float = _number(1.0, "a number from 0 to 2", least=0, most=2)
    """0 is greedy."""
    top_p: float = _number(1.0, "a number above 0 and at most 1", above=0, most=1)
    top_k: int = _integer(0, "an integer from 1 to 2^31, or 0 or -1 for off", least=-1, most=2**31 - 1)
    min_p: float = _number(0.0, "a number from 0 to 1", least=0, most=1)
    """Drops tokens whose probability is below this share of the most likely one's."""
    seed: int | None = _optional_integer("an integer of 64 bits", least=-(2**63), most=2**63 - 1)
    """A draw depends on (seed, position) only, whatever else runs."""
    stop: tuple[str, ...] = attrs.field(
        default=(), converter=to_strings, validator=_words(_MAX_STOP_STRINGS, "stop strings")
    )
    """Generation ends when one of these appears; it is cut off unless `include_stop_str_in_output`."""
    stop_token_ids: tuple[int, ...] = attrs.field(
        default=(), converter=to_tuple, validator=at_most(_MAX_STOP_TOKENS, "token ids", token_ids)
    )
    ignore_eos: bool = attrs.field(default=False, validator=boolean)
    max_tokens: int | None = _optional_integer("an integer >= 1, or null", least=1, default=16)
    """None: the model's own limit, or as many as the context window holds."""
    min_tokens: int = _integer(0, "an integer >= 0", least=0)
    """No EOS, stop token or stop string before this many tokens."""
    logprobs: int | None = _num_logprobs()
    """Report the sampled token's logprob and those of this many most likely tokens, -1: of all tokens. An
    engine's `max_logprobs` is the limit."""
    prompt_logprobs: int | None = _num_logprobs()
    """The same for each token of the prompt but the first."""
    logprob_token_ids: tuple[int, ...] = attrs.field(
        default=(), converter=to_tuple, validator=at_most(_MAX_LOGPROB_TOKEN_IDS, "token ids", token_ids)
    )
    """Report the logprobs of these tokens too, at each generated position."""
    flat_logprobs: bool = attrs.field(default=False, validator=boolean)
    """Report logprobs in arrays (`FlatLogprobs`) instead of dicts: for many of them."""
    detokenize: bool = attrs.field(default=True, validator=boolean)
    skip_special_tokens: bool = attrs.field(default=True, validator=boolean)
    include_stop_str_in_output: bool = attrs.field(default=False, validator=boolean)
    logit_bias: dict[int, float] | None = attrs.field(
        default=None, converter=_to_logit_bias, validator=at_most(_MAX_BIASES, "token ids", _logit_bias)
    )
    allowed_token_ids: tuple[int, ...] | None = attrs.field(
        default=None,
        converter=_to_optional_tuple,
        validator=at_most(_MAX_ALLOWED_TOKENS, "token ids", _allowed_token_ids),
    )
    """Only these tokens can be drawn."""
    bad_words: tuple[str, ...] = attrs.field(
        default=(), converter=to_strings, validator=_words(_MAX_BAD_WORDS, "words")
    )
    """Texts whose tokens, with or without a space before them, are never completed."""
    structured_outputs: StructuredOutputsParams | None = attrs.field(
        default=None, validator=one_of_class(StructuredOutputsParams)
    )
    thinking_token_budget: int | None = _optional_integer("an integer >= 0", least=0)
    """A model that thinks is made to stop thinking after this many tokens."""
    repetition_detection: RepetitionDetection | None = attrs.field(
        default=None, validator=one_of_class(RepetitionDetection)
    )
    skip_reading_prefix_cache: bool | None = attrs.field(default=None, validator=optional(boolean))
    """Compute the whole prompt, even if its beginning is known. None: if `prompt_logprobs` are asked for."""
    extra_args: dict[str, Any] | None = attrs.field(default=None, validator=optional(json_object))
    """For custom logits processors: whatever JSON can express."""
    output_kind: RequestOutputKind = attrs.field(
        default=RequestOutputKind.CUMULATIVE, converter=_to_output_kind
    )

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}.",
                parameter="min_tokens",
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop needs detokenize=True, got detokenize=False.", parameter="stop")

    @property
    def reads_prefix_cache(self) -> bool:
        if self.skip_reading_prefix_cache is None:
            return self.prompt_logprobs is None
        return not self.skip_reading_prefix_cache

    @property
    def reports_logprobs(self) -> bool:
        """Of generated tokens."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def needs_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0
