"""How one request is to be sampled, stopped and reported."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.text import is_unicode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["GREEDY_BELOW", "MAX_LOGPROBS", "RequestOutputKind", "SamplingParams"]

GREEDY_BELOW = 1e-5
"""Temperatures below this pick the most likely token."""

MAX_LOGPROBS = 20


class RequestOutputKind(enum.IntEnum):
    """What each output of a stream carries."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """What is new since the output before."""
    FINAL_ONLY = 2
    """One output, at the end; nothing travels before it."""


def _reject(attribute: attrs.Attribute[Any], value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{attribute.name} must be {allowed}, got {value!r}.", parameter=attribute.name
    )


def _number(allowed: str, accepts: Callable[[float], bool]) -> Callable[..., None]:
    """A validator for finite numbers (booleans are not numbers here)."""

    def validate(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _reject(attribute, value, allowed)
        if not accepts(value):
            raise _reject(attribute, value, allowed)

    return validate


def _integer(allowed: str, accepts: Callable[[int], bool]) -> Callable[..., None]:
    def validate(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not accepts(value):
            raise _reject(attribute, value, allowed)

    return validate


def _boolean(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise _reject(attribute, value, "true or false")


def _optional(validate: Callable[..., None]) -> Callable[..., None]:
    def validate_optional(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is not None:
            validate(instance, attribute, value)

    return validate_optional


def _to_stop_strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _stop_strings(_: object, attribute: attrs.Attribute[Any], value: tuple[object, ...]) -> None:
    if not all(isinstance(text, str) and text and is_unicode(text) for text in value):
        raise _reject(attribute, list(value), "a non-empty string or a list of non-empty strings")


def _token_ids(_: object, attribute: attrs.Attribute[Any], value: tuple[object, ...]) -> None:
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value):
        raise _reject(attribute, list(value), "a list of token ids (integers >= 0)")


def _to_tuple(value: Iterable[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value)


def _to_logit_bias(value: dict[Any, Any] | None) -> dict[int, float] | None:
    """Keys may be numerals, as JSON has no integer keys; values are clamped to +-100 (OpenAI's range)."""
    if not value:
        return None
    try:
        return {int(token): min(100.0, max(-100.0, float(bias))) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise InvalidRequestError(
            f"logit_bias must map token ids (integers) to numbers, got {value!r}.", parameter="logit_bias"
        ) from None


def _logit_bias(_: object, attribute: attrs.Attribute[Any], value: dict[int, float] | None) -> None:
    for token, bias in (value or {}).items():
        if token < 0 or math.isnan(bias):
            raise _reject(attribute, {token: bias}, "a map of token ids (integers >= 0) to numbers")


def _penalty() -> Any:
    return attrs.field(default=0.0, validator=_number("a number from -2 to 2", lambda v: -2 <= v <= 2))


@attrs.frozen(kw_only=True)
class SamplingParams:
    """Validated at construction: a wrong value raises `InvalidRequestError`, which names the field.

    The order in which they act, per step: raw logprobs are taken, then `min_tokens` and `logit_bias`,
    penalties, temperature, `min_p`, `top_k`, `top_p`, and the draw.
    """

    n: int = attrs.field(default=1, validator=_integer("an integer from 1 to 128", lambda v: 1 <= v <= 128))
    """Completions per prompt."""
    presence_penalty: float = _penalty()
    """Subtracted once from the logit of every token that was generated already."""
    frequency_penalty: float = _penalty()
    """Subtracted from a token's logit once per time it was generated."""
    repetition_penalty: float = attrs.field(
        default=1.0, validator=_number("a number above 0 and at most 10", lambda v: 0 < v <= 10)
    )
    """Divides positive and multiplies negative logits of every token in prompt or output."""
    temperature: float = attrs.field(
        default=1.0, validator=_number("a number from 0 to 2", lambda v: 0 <= v <= 2)
    )
    """0 is greedy."""
    top_p: float = attrs.field(
        default=1.0, validator=_number("a number above 0 and at most 1", lambda v: 0 < v <= 1)
    )
    top_k: int = attrs.field(
        default=0,
        validator=_integer("an integer from 1 to 2^31, or 0 or -1 for off", lambda v: -1 <= v < 2**31),
    )
    min_p: float = attrs.field(default=0.0, validator=_number("a number from 0 to 1", lambda v: 0 <= v <= 1))
    """Drops tokens whose probability is below this share of the most likely one's."""
    seed: int | None = attrs.field(
        default=None,
        validator=_optional(_integer("an integer of 64 bits", lambda v: -(2**63) <= v < 2**63)),
    )
    """A draw depends on (seed, position) only, whatever else runs."""
    stop: tuple[str, ...] = attrs.field(default=(), converter=_to_stop_strings, validator=_stop_strings)
    """Generation ends when one of these appears; it is cut off unless `include_stop_str_in_output`."""
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_to_tuple, validator=_token_ids)
    ignore_eos: bool = attrs.field(default=False, validator=_boolean)
    max_tokens: int | None = attrs.field(
        default=16, validator=_optional(_integer("an integer >= 1, or null", lambda v: v >= 1))
    )
    """None: the model's own limit, or as many as the context window holds."""
    min_tokens: int = attrs.field(default=0, validator=_integer("an integer >= 0", lambda v: v >= 0))
    """No EOS, stop token or stop string before this many tokens."""
    logprobs: int | None = attrs.field(
        default=None,
        validator=_optional(
            _integer(f"an integer from 0 to {MAX_LOGPROBS}", lambda v: 0 <= v <= MAX_LOGPROBS)
        ),
    )
    """Report the sampled token's logprob and those of this many most likely tokens."""
    detokenize: bool = attrs.field(default=True, validator=_boolean)
    skip_special_tokens: bool = attrs.field(default=True, validator=_boolean)
    include_stop_str_in_output: bool = attrs.field(default=False, validator=_boolean)
    logit_bias: dict[int, float] | None = attrs.field(
        default=None, converter=_to_logit_bias, validator=_logit_bias
    )
    output_kind: RequestOutputKind = attrs.field(
        default=RequestOutputKind.CUMULATIVE, converter=RequestOutputKind
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
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def needs_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0
