"""Lists of a body, which may have millions of items while the event loop waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args, get_origin

import cattrs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["shorten", "structure_lists_quickly"]

_MAX_PROBLEMS = 10
"""Of one list or object, that are told: each costs a hundred times what a right item does."""


def structure_lists_quickly(converter: cattrs.Converter) -> None:
    """Have it take a list of scalars as it is if all have the right type, and give up on a list or an
    object of many wrong items after the first few."""

    def list_hook(kind: Any) -> Callable[[Any, Any], Any]:
        (item,) = get_args(kind)

        def structure_list(value: Any, _: object) -> list[Any]:
            if not isinstance(value, list):
                raise ValueError(f"must be a list, got {shorten(value)}")
            if item in {int, str} and set(map(type, value)) <= {item}:
                return value
            return _structure_items(converter, enumerate(value), item, kind)

        return structure_list

    def dict_hook(kind: Any) -> Callable[[Any, Any], Any]:
        _, item = get_args(kind)

        def structure_dict(value: Any, _: object) -> dict[str, Any]:
            if not isinstance(value, dict):
                raise ValueError(f"must be an object, got {shorten(value)}")
            if item is Any:
                return value
            return dict(zip(value, _structure_items(converter, value.items(), item, kind), strict=True))

        return structure_dict

    converter.register_structure_hook_factory(_is_list, list_hook)
    converter.register_structure_hook_factory(_is_map, dict_hook)


def _is_list(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is list


def _is_map(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is dict


def _structure_items(
    converter: cattrs.Converter, items: Iterable[tuple[Any, Any]], item: Any, kind: Any
) -> list[Any]:
    structured: list[Any] = []
    errors: list[Exception] = []
    for place, value in items:
        try:
            structured.append(converter.structure(value, item))
        except Exception as error:  # whatever the item's own hook raised
            error.__notes__ = [
                *getattr(error, "__notes__", ()),
                cattrs.IterableValidationNote(f"at {place}", place, item),
            ]
            errors.append(error)
            if len(errors) == _MAX_PROBLEMS:
                break
    if errors:
        raise cattrs.IterableValidationError(f"while structuring {kind}", errors, kind)
    return structured


def shorten(value: object) -> str:
    """How a message shows a value of a body: in one short line."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
