"""JSON from users, which the engine core takes apart again: small and flat enough to be harmless there."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from trioserve.errors import InvalidRequestError
from trioserve.text import is_unicode
from trioserve.validators import reject, shown

if TYPE_CHECKING:
    import attrs

__all__ = ["MAX_DEPTH", "MAX_SIZE", "is_flat", "json_object"]

MAX_SIZE = 256 * 2**10
"""Bytes of text. The core needs some milliseconds for so much, in which it does nothing else."""

MAX_DEPTH = 64
"""Of nesting. How much of it Python bears depends on its own stack, which is another one in the core."""


def is_flat(value: object) -> bool:
    """For what was parsed: no deeper than MAX_DEPTH. (A parsed value cannot contain itself.)"""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return True
        level = [
            item
            for container in containers
            for item in (container.values() if isinstance(container, dict) else container)
        ]
    return False


def _sending_problem(value: object) -> str | None:
    """What keeps `value` from being sent as JSON, in words; None if nothing does.

    Level by level: it must not recurse itself, and ends where values contain themselves.
    """
    size = 0
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 2):
        if not level:
            return None
        below: list[Any] = []
        for container in level:
            for part in _parts(container):
                if isinstance(part, dict | list | tuple):
                    below.append(part)
                elif not _is_scalar(part):
                    return f"it holds {shown(part)}, which JSON cannot express"
                size += len(part) if isinstance(part, str) else 1
                if size > MAX_SIZE:
                    return f"it is larger than {MAX_SIZE} bytes"
        level = below
    return f"it is nested more than {MAX_DEPTH} deep"


def _parts(container: Any) -> Any:
    if not isinstance(container, dict):
        return container
    keys = (key if isinstance(key, str) else _Key(key) for key in container)
    return chain(keys, container.values())


class _Key:
    """A key that is no string: nothing that JSON has."""

    def __init__(self, key: object) -> None:
        self._key = key

    def __repr__(self) -> str:
        return f"the key {self._key!r}"


def _is_scalar(value: object) -> bool:
    """One of Python's own, in the ranges that msgpack has."""
    if type(value) is int:
        return -(2**63) <= value < 2**64
    if type(value) is str:
        return is_unicode(value)
    return value is None or type(value) in {float, bool}


def json_object(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """A validator for a dict of what JSON has."""
    if not isinstance(value, dict):
        raise reject(attribute, value, "an object, or null")
    if (problem := _sending_problem(value)) is not None:
        raise InvalidRequestError(
            f"{attribute.name} cannot be sent to the engine: {problem}.", parameter=attribute.name
        )
