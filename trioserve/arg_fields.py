"""Fields of the classes that hold what a user can set.

The converters take what Python, JSON or a command line gives, and raise `InvalidConfigError`, which names the
field, the value and what is allowed.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from trioserve.errors import InvalidConfigError
from trioserve.quantities import parse_quantity
from trioserve.structuring import find_problems, make_converter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "KeyDigest",
    "arg",
    "choice",
    "fail",
    "flag",
    "json_object",
    "keys",
    "nested",
    "number",
    "optional_nested",
    "quantity",
    "seconds",
    "text",
    "texts",
]

T = TypeVar("T")

_nested_converter = make_converter(forbid_extra_keys=True)


def fail(field: str, value: object, allowed: str) -> InvalidConfigError:
    return InvalidConfigError(f"{field} must be {allowed}, got {value!r}.", field=field)


def quantity(field: str, *, least: int, auto: bool = False) -> Callable[[Any], int | None]:
    allowed = f"an integer >= {least} (8k and 2GiB are understood)" + (", or 'auto'" if auto else "")

    def convert(value: Any) -> int | None:
        if auto and value in {None, "auto"}:
            return None
        try:
            converted = parse_quantity(value)
        except ValueError:
            raise fail(field, value, allowed) from None
        if converted < least:
            raise fail(field, value, allowed)
        return converted

    return convert


def number(field: str, *, allowed: str, accepts: Callable[[float], bool]) -> Callable[[Any], float]:
    def convert(value: Any) -> float:
        try:
            converted = float(value)
        except (TypeError, ValueError):
            raise fail(field, value, allowed) from None
        if isinstance(value, bool) or not accepts(converted):
            raise fail(field, value, allowed)
        return converted

    return convert


def seconds(field: str) -> Callable[[Any], float]:
    return number(field, allowed="a number of seconds >= 0", accepts=lambda v: v >= 0)


def choice(field: str, choices: tuple[str, ...]) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if value not in choices:
            raise fail(field, value, "one of " + ", ".join(choices))
        return str(value)

    return convert


def flag(field: str) -> Callable[[Any], bool]:
    def convert(value: Any) -> bool:
        if not isinstance(value, bool):
            raise fail(field, value, "true or false")
        return value

    return convert


def text(field: str, *, optional: bool = False) -> Callable[[Any], str | None]:
    def convert(value: Any) -> str | None:
        if value is None and optional:
            return None
        given = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(given, str) or not given:
            raise fail(field, value, "a non-empty string")
        return given

    return convert


def texts(field: str) -> Callable[[Any], tuple[str, ...]]:
    def convert(value: str | Iterable[str] | None) -> tuple[str, ...]:
        if value is None:
            return ()
        given = (value,) if isinstance(value, str) else tuple(value)
        if not all(isinstance(item, str) and item for item in given):
            raise fail(field, value, "a non-empty string or a list of them")
        return given

    return convert


class KeyDigest(str):
    """The SHA-256 of a secret key, in hexadecimal: all that is kept of it."""

    __slots__ = ()

    @classmethod
    def of(cls, key: bytes) -> KeyDigest:
        return cls(hashlib.sha256(key).hexdigest())


def keys(field: str) -> Callable[[Any], tuple[str, ...]]:
    """Secret keys, of which only the digests come out. Errors do not show them."""
    allowed = "a key or a list of keys, each non-empty and without white space"

    def digest(key: Any) -> KeyDigest:
        if isinstance(key, KeyDigest):
            return key
        if not isinstance(key, str) or key.split() != [key]:
            raise InvalidConfigError(f"{field} must be {allowed}.", field=field)
        # What is no UTF-8 on the command line is sent by clients as the same bytes.
        return KeyDigest.of(key.encode(errors="surrogateescape"))

    def convert(value: str | Iterable[str] | None) -> tuple[str, ...]:
        given = (value,) if isinstance(value, str) else tuple(value or ())
        return tuple(digest(key) for key in given)

    return convert


def nested(field: str, kind: type[T]) -> Callable[[Any], T]:
    """An object of `kind`, a dict of its fields, or JSON of one."""

    def convert(value: Any) -> T:
        if isinstance(value, kind):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise fail(field, value, "a JSON object") from None
        try:
            return _nested_converter.structure(value, kind)
        except Exception as error:
            problem = find_problems(error, field)[0]
            raise InvalidConfigError(f"{problem.path} {problem.message}.", field=problem.path) from None

    return convert


def json_object(field: str) -> Callable[[Any], dict[str, Any]]:
    """A dict, or JSON of an object."""

    def convert(value: Any) -> dict[str, Any]:
        given = value
        if isinstance(value, str):
            try:
                given = json.loads(value)
            except ValueError:
                raise fail(field, value, "a JSON object") from None
        if not isinstance(given, dict):
            raise fail(field, value, "a JSON object")
        return given

    return convert


def optional_nested(field: str, kind: type[T]) -> Callable[[Any], T | None]:
    convert = nested(field, kind)
    return lambda value: None if value is None else convert(value)


def arg(help: str, convert: Callable[[Any], Any], **kwargs: Any) -> Any:  # noqa: A002 - attrs' word for it
    return attrs.field(converter=convert, metadata={"help": help}, **kwargs)
