"""From JSON-like data to attrs classes, strictly, with every wrong field reported by its path.

cattrs does the work; this module makes it strict (a string is no number, a number is no boolean) and
turns its error groups into plain `FieldProblem`s.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs
import cattrs
from cattrs.cols import list_structure_factory
from cattrs.gen import make_dict_structure_fn

__all__ = ["FieldProblem", "find_problems", "make_converter"]

T = TypeVar("T")
_Hook = Callable[[Any, Any], Any]

_NAMES: dict[Any, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
_SCALARS = (str, int, float, bool)
_JSON_SHAPES: dict[Any, type | tuple[type, ...]] = {
    type(None): type(None),
    str: str,
    bool: bool,
    int: int,
    float: (int, float),
}


@attrs.frozen
class FieldProblem:
    """One wrong field."""

    path: str
    """Such as `messages[2].content`; empty for the body itself."""
    message: str
    error: Exception
    """What was raised for it: an `InvalidRequestError` keeps its own wording."""


class _WrongTypeError(ValueError):
    pass


def _name_of(kind: Any) -> str:
    if kind in _NAMES:
        return _NAMES[kind]
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if origin in {list, tuple}:
        return "a list"
    return "an object"


def _wrong(kind: Any, value: object) -> _WrongTypeError:
    shown = repr(value)
    return _WrongTypeError(
        f"must be {_name_of(kind)}, got {shown if len(shown) <= 80 else shown[:77] + '...'}"
    )


def _structure_scalar(value: object, kind: type[T]) -> T:
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)  # type: ignore[return-value]  # JSON does not tell 16.0 from 16
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)  # type: ignore[return-value]
    if isinstance(value, bool) and kind is not bool:
        raise _wrong(kind, value)
    if not isinstance(value, kind):
        raise _wrong(kind, value)
    return value


def _structure_literal(value: object, kind: Any) -> object:
    # `in` alone would take True for 1 and 1.0 for 1.
    for allowed in get_args(kind):
        if type(allowed) is type(value) and allowed == value:
            return value
    raise _wrong(kind, value)


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in {Union, types.UnionType}


def _is_literal(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is Literal


def _is_list(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is list


def _is_uniform_tuple(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is tuple and get_args(kind)[1:] == (...,)


def _matches_shape(value: object, kind: Any) -> bool:
    """Could `kind` be meant by a value of this JSON shape? Decides a union without guessing by errors."""
    origin = get_origin(kind) or kind
    if origin is Literal:
        return value in get_args(kind)
    if origin in {list, tuple}:
        return isinstance(value, list | tuple) and _matches_first(value, get_args(kind))
    if origin in {int, float} and isinstance(value, bool):
        return False
    if origin is int and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _JSON_SHAPES.get(origin, dict))


def _matches_first(value: Any, arguments: tuple[Any, ...]) -> bool:
    """list[str] and list[list[int]] differ in their first item."""
    if not value or not arguments:
        return True
    item = arguments[0]
    if _is_union(item):
        return any(_matches_shape(value[0], kind) for kind in get_args(item))
    if _is_literal(item):  # a wrong one is the item's error, not the list's
        return type(value[0]) in map(type, get_args(item))
    return _matches_shape(value[0], item)


@cache
def _tags(kind: Any) -> tuple[Any, ...]:
    """Of a class whose `type` says which of several objects it is: what that may be."""
    hint = get_type_hints(kind).get("type") if attrs.has(kind) else None
    return get_args(hint) if _is_literal(hint) else ()


def _has_other_tag(value: object, kind: Any) -> bool:
    if not (isinstance(value, dict) and "type" in value):
        return False
    tags = _tags(kind)
    return bool(tags) and value["type"] not in tags


def _union_hook(converter: cattrs.Converter) -> _Hook:
    def structure(value: object, kind: Any) -> Any:
        candidates = [member for member in get_args(kind) if _matches_shape(value, member)]
        if candidates:
            # If none has the value's tag, the first one is to say which tags there are.
            own = [member for member in candidates if not _has_other_tag(value, member)]
            member = (own or candidates)[0]
            return None if member is type(None) else converter.structure(value, member)
        expected = " or ".join(_name_of(member) for member in get_args(kind) if member is not type(None))
        shown = repr(value)
        raise _WrongTypeError(f"must be {expected}, got {shown if len(shown) <= 80 else shown[:77] + '...'}")

    return structure


def make_converter(*, forbid_extra_keys: bool) -> cattrs.Converter:
    """A strict converter that collects all the errors of a value (see `find_problems`)."""
    converter = cattrs.Converter(detailed_validation=True)
    for kind in _SCALARS:
        converter.register_structure_hook(kind, _structure_scalar)
    converter.register_structure_hook_func(_is_literal, _structure_literal)
    converter.register_structure_hook_func(_is_union, _union_hook(converter))

    def attrs_hook(kind: type[Any]) -> _Hook:
        structure = make_dict_structure_fn(
            kind, converter, _cattrs_forbid_extra_keys=forbid_extra_keys, _cattrs_detailed_validation=True
        )

        def structure_object(value: object, target: Any) -> Any:
            if not isinstance(value, dict):
                raise _wrong(kind, value)
            return structure(value, target)

        return structure_object

    def list_hook(kind: Any) -> _Hook:
        structure = list_structure_factory(kind, converter)

        def structure_list(value: object, target: Any) -> Any:
            if not isinstance(value, list | tuple):
                raise _wrong(kind, value)  # a string is iterable, and no list
            return structure(value, target)

        return structure_list

    def tuple_hook(kind: Any) -> _Hook:
        items = list_hook(types.GenericAlias(list, get_args(kind)[0]))
        return lambda value, _: tuple(items(value, kind))

    converter.register_structure_hook_factory(_is_list, list_hook)
    converter.register_structure_hook_factory(_is_uniform_tuple, tuple_hook)
    converter.register_structure_hook_factory(attrs.has, attrs_hook)
    return converter


def find_problems(error: Exception, path: str = "") -> list[FieldProblem]:
    """Every leaf of cattrs' error groups, with its path; `error` itself if it is no group."""
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        names = ", ".join(sorted(map(repr, error.extra_fields)))
        return [FieldProblem(path, f"has unknown keys: {names}", error)]
    if not isinstance(error, cattrs.BaseValidationError):
        return [_leaf(error, path)]
    problems: list[FieldProblem] = []
    for nested in error.exceptions:
        problems += find_problems(nested, path + _step(nested, bool(path)))
    return problems


def _step(error: Exception, nested: bool) -> str:
    """What cattrs noted on the way: an attribute's name or a list's index."""
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, cattrs.AttributeValidationNote):
            return f".{note.name}" if nested else note.name
        if isinstance(note, cattrs.IterableValidationNote):
            return f"[{note.index}]"
    return ""


def _leaf(error: Exception, path: str) -> FieldProblem:
    if isinstance(error, KeyError):
        missing = str(error.args[0])
        return FieldProblem(
            f"{path}.{missing}" if path and not path.endswith(missing) else path or missing,
            "is required",
            error,
        )
    return FieldProblem(path, str(error), error)
