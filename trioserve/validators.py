"""Checks of what users set on a request: each names the field, the value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.text import is_unicode

__all__ = [
    "HIGHEST_COUNT",
    "Check",
    "accepts",
    "at_most",
    "boolean",
    "integer",
    "non_empty_strings",
    "number",
    "one_of",
    "one_of_class",
    "optional",
    "plain",
    "reject",
    "shown",
    "to_strings",
    "to_tuple",
    "token_ids",
]


HIGHEST_COUNT = 2**31 - 1
"""Of anything that is counted; so that whatever was accepted can also be sent to the engine core."""

_MAX_SHOWN = 200


def shown(value: object) -> str:
    """How an error message shows `value`: in one short line, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # of nesting without end, integers of thousands of digits, foreign classes
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def reject(attribute: attrs.Attribute[Any], value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{attribute.name} must be {allowed}, got {shown(value)}.", parameter=attribute.name
    )


def plain(value: Any) -> Any:
    """A number or string of a class derived from Python's own, such as NumPy's float64, as Python's own; only
    those can be sent to the engine core. Anything else is left as it is, for the validator."""
    if type(value) in {int, float, str, bool}:
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enumeration's own __str__ gives its name
    if isinstance(value, float):
        return float(value)
    return int(value) if isinstance(value, int) else value


def one_of(allowed: Sequence[str]) -> Check:
    def validate(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value not in allowed:
            raise reject(attribute, value, f"one of {', '.join(allowed)}")

    return Check(validate, {"enum": list(allowed)})


def one_of_class(kind: type) -> Callable[..., None]:
    def validate(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is not None and not isinstance(value, kind):
            raise reject(attribute, value, f"null or a {kind.__name__}")

    return validate


@attrs.frozen
class Check:
    """A validator that can say which values it accepts."""

    _validate: Callable[..., None]
    schema: Mapping[str, Any]
    """In keywords of JSON Schema, each of which is about values of one type only; without the type itself.
    What these cannot express is left out."""

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        self._validate(instance, attribute, value)

    def accepting(self, **schema: Any) -> Check:
        """The same, with these keywords as well."""
        return Check(self._validate, {**self.schema, **schema})


def accepts(**schema: Any) -> Callable[[Callable[..., None]], Check]:
    """Makes a `Check` of a validator; the keywords are those of JSON Schema."""
    return lambda validate: Check(validate, schema)


def at_most(limit: int, what: str, validate: Check) -> Check:
    """`validate`, for at most so many items, which are called `what`."""

    def validate_few(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is not None and isinstance(value, tuple | dict) and len(value) > limit:
            message = f"{attribute.name} must be at most {limit} {what}, got {len(value)}."
            raise InvalidRequestError(message, parameter=attribute.name)
        validate(instance, attribute, value)

    return Check(validate_few, {**validate.schema, "maxItems": limit, "maxProperties": limit})


def number(
    allowed: str, *, least: float | None = None, above: float | None = None, most: float | None = None
) -> Check:
    """A validator for finite numbers (booleans are not numbers here) from `least`, or more than `above`, to
    `most`; `allowed` says that in words."""

    def validate(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise reject(attribute, value, allowed)
        too_low = (least is not None and value < least) or (above is not None and value <= above)
        if too_low or (most is not None and value > most):
            raise reject(attribute, value, allowed)

    bounds = {"minimum": least, "exclusiveMinimum": above, "maximum": most}
    return Check(validate, {keyword: bound for keyword, bound in bounds.items() if bound is not None})


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def integer(allowed: str, least: int, most: int = HIGHEST_COUNT) -> Check:
    """A validator for integers from `least` to `most`; `allowed` says that in words."""

    def validate(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise reject(attribute, value, allowed)

    return Check(validate, {"minimum": least, "maximum": most})


def boolean(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise reject(attribute, value, "true or false")


def optional(validate: Callable[..., None]) -> Check:
    def validate_optional(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is not None:
            validate(instance, attribute, value)

    return Check(validate_optional, validate.schema if isinstance(validate, Check) else {})


def to_strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    strings: tuple[str, ...] = _to_tuple((value,) if isinstance(value, str) else value)
    return strings


@accepts(minLength=1, items={"minLength": 1})
def non_empty_strings(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not (isinstance(value, tuple) and all(_is_non_empty(text) for text in value)):
        raise reject(attribute, _as_list(value), "a non-empty string or a list of non-empty strings")


def _as_list(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _is_non_empty(text: object) -> bool:
    return isinstance(text, str) and bool(text) and is_unicode(text)


@accepts(items={"minimum": 0, "maximum": HIGHEST_COUNT})
def token_ids(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not (isinstance(value, tuple) and all(_is_token_id(token) for token in value)):
        raise reject(attribute, _as_list(value), "a list of token ids (integers >= 0)")


def _is_token_id(token: object) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= HIGHEST_COUNT


def to_tuple(value: Iterable[int] | None) -> tuple[int, ...]:
    numbers: tuple[int, ...] = _to_tuple(value)
    return numbers


def _to_tuple(value: Any) -> Any:
    """What cannot be iterated is left as it is, for the validator."""
    if value is None:
        return ()
    return tuple(map(plain, value)) if isinstance(value, Iterable) else value
