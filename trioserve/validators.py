"""Checks of what users set on a request: each names the field, the value and what is allowed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from trioserve.errors import InvalidRequestError
from trioserve.text import is_unicode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import attrs

__all__ = [
    "boolean",
    "integer",
    "non_empty_strings",
    "number",
    "optional",
    "reject",
    "to_strings",
    "to_tuple",
    "token_ids",
]


def reject(attribute: attrs.Attribute[Any], value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{attribute.name} must be {allowed}, got {value!r}.", parameter=attribute.name
    )


def number(allowed: str, accepts: Callable[[float], bool]) -> Callable[..., None]:
    """A validator for finite numbers (booleans are not numbers here)."""

    def validate(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise reject(attribute, value, allowed)
        if not accepts(value):
            raise reject(attribute, value, allowed)

    return validate


def integer(allowed: str, accepts: Callable[[int], bool]) -> Callable[..., None]:
    def validate(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not accepts(value):
            raise reject(attribute, value, allowed)

    return validate


def boolean(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise reject(attribute, value, "true or false")


def optional(validate: Callable[..., None]) -> Callable[..., None]:
    def validate_optional(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is not None:
            validate(instance, attribute, value)

    return validate_optional


def to_strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def non_empty_strings(_: object, attribute: attrs.Attribute[Any], value: tuple[object, ...]) -> None:
    if not all(isinstance(text, str) and text and is_unicode(text) for text in value):
        raise reject(attribute, list(value), "a non-empty string or a list of non-empty strings")


def token_ids(_: object, attribute: attrs.Attribute[Any], value: tuple[object, ...]) -> None:
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value):
        raise reject(attribute, list(value), "a list of token ids (integers >= 0)")


def to_tuple(value: Iterable[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value)
