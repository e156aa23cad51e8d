"""Operators, filters and methods of chat templates, each within the limits of the rendering.

Whatever can make much from little (`"a" * 10**9`, `|center(10**9)`) is checked before it is done; everything
that makes text or lists is counted after it. What is not listed here, templates cannot use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from trioserve.frontend.template_limits import ITEM_SIZE, MAX_BITS, TemplateLimitError, limits, text_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "FILTERS",
    "check_call",
    "check_operator",
    "foresee_formatting",
    "join_texts",
    "limited",
    "limited_filter",
]

_LONG = 2**16
"""Characters beyond which the worst is assumed of a text, rather than looked for."""

_MAX_DIGITS = 100
"""Of `|round`."""

_MAX_INDENT = 16
"""Of `|tojson`, and its separators' length."""

_WIDE = re.compile(r"[%{][^a-zA-Z%{}]*(?:\d{5}|\*)|\{[^{}]*(?:\d{5}|\{)")
"""In a format: a width or precision of five digits, or one that is an argument's."""

_MAX_NUMBER = 10_000 + MAX_BITS
"""Characters of a formatted number, its width included."""


def _is_sequence(value: Any) -> bool:
    return isinstance(value, str | list | tuple)


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


# Operators


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Before `left operator right`.

    Raises:
      TemplateLimitError: the result would be too large.
    """
    match operator:
        case "*":
            _check_product(left, right)
        case "**":
            if _bits(left) * abs(right if isinstance(right, int) else 0) > MAX_BITS:
                raise TemplateLimitError(f"an integer has more than {MAX_BITS} bits")
        case "%" if isinstance(left, str):
            foresee_formatting(left, right)
        case "+" if _is_sequence(left) and _is_sequence(right):
            limits().foresee((len(left) + len(right)) * (1 if isinstance(left, str) else ITEM_SIZE))


def _check_product(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if _is_sequence(sequence) and isinstance(times, int):
            limits().foresee(len(sequence) * times * (1 if isinstance(sequence, str) else ITEM_SIZE))
    if _bits(left) + _bits(right) > MAX_BITS:
        raise TemplateLimitError(f"an integer has more than {MAX_BITS} bits")


def foresee_formatting(form: str, arguments: Any) -> None:
    """Before `form % arguments` or `form.format(arguments)`. Arguments may stand in each place.

    Raises:
      TemplateLimitError: the result could be too large.
    """
    if _WIDE.search(form):
        raise TemplateLimitError(
            "a format may have no width of more than four digits, nor one as an argument"
        )
    places = form.count("%") + form.count("{")
    limits().foresee(len(form) + places * (text_size(arguments) + _MAX_NUMBER))


def join_texts(values: Iterable[Any]) -> str:
    """`a ~ b`, and the pieces that a template or a block of it has written."""
    allowance = limits()
    texts: list[str] = []
    size = 0
    for value in values:
        allowance.tick()
        text = value if isinstance(value, str) else str(_shown(value))
        size += len(text)
        allowance.foresee(size)
        texts.append(text)
    return str(allowance.charge("".join(texts)))


def _shown(value: Any) -> Any:
    text_size(value)
    return value


# Methods

_TEXT_METHODS = frozenset(
    {
        "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii",
        "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
        "isupper", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "rfind", "rindex",
        "rpartition", "rstrip", "startswith", "strip", "swapcase", "title", "upper",
    }
)  # fmt: skip
"""Those that make no more text than there was."""
_DATA_METHODS = frozenset({"copy", "count", "get", "index", "items", "keys", "values"})


def _check_padding(text: str, width: Any = 0, *_: Any) -> None:
    limits().foresee(max(len(text), width))


def _check_tabs(text: str, tabsize: Any = 8) -> None:
    limits().foresee(len(text) + text.count("\t") * tabsize)


def _check_replacement(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    text, old, new = _as_text(text), _as_text(old), _as_text(new)
    limits().foresee(len(text) + text.count(old) * len(new))


def _check_join(separator: str, values: Any = ()) -> None:
    # A sequence only: the texts of an iterator cannot be looked at twice.
    if not _is_sequence(values):
        raise TemplateLimitError("join needs a list; use the filter |list first")
    limits().foresee(text_size(values) + len(values) * len(separator))


def _check_split(text: str, sep: Any = None, maxsplit: int = -1) -> None:
    pieces = len(text) // 2 if sep is None else text.count(sep)
    if maxsplit >= 0:
        pieces = min(pieces, maxsplit)
    limits().foresee(len(text) + pieces * ITEM_SIZE)


def _check_lines(text: str, *_: Any, **__: Any) -> None:
    limits().foresee(len(text) * ITEM_SIZE if len(text) > _LONG else len(text))


_GROWING_METHODS: Mapping[str, Callable[..., None]] = {
    "center": _check_padding,
    "expandtabs": _check_tabs,
    "join": _check_join,
    "ljust": _check_padding,
    "replace": _check_replacement,
    "rjust": _check_padding,
    "rsplit": _check_split,
    "split": _check_split,
    "splitlines": _check_lines,
    "zfill": _check_padding,
}


def check_call(function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Before a call.

    Raises:
      TemplateLimitError: the result would be too large.
      SecurityError: it is a method of a value, and not one that templates may call.
    """
    owner = getattr(function, "__self__", None)
    if function in {dict, Namespace} or (isinstance(owner, LoopContext) and function.__name__ == "changed"):
        text_size(arguments)
    if not isinstance(owner, str | bytes | int | float | list | tuple | dict | set | frozenset):
        return
    name = function.__name__
    if isinstance(owner, str) and name in _GROWING_METHODS:
        _GROWING_METHODS[name](owner, *arguments, **named)
    elif isinstance(owner, str) and name in _TEXT_METHODS:
        return
    elif isinstance(owner, list | tuple | dict) and name in _DATA_METHODS:
        if name in {"count", "index"}:
            text_size(owner)
        text_size(arguments)
    else:
        raise SecurityError(f"{name} of {type(owner).__name__!r} is not available to templates")


# Filters


def _check_nothing(*_: Any, **__: Any) -> None:
    return None


def _check_text(value: Any, *_: Any, **__: Any) -> None:
    text_size(value)


def _check_words(value: Any, *_: Any, **__: Any) -> None:
    """Each becomes a text of its own."""
    size = text_size(value)
    limits().foresee(size * ITEM_SIZE if size > _LONG else size)


def _check_items(value: Any, *_: Any, **__: Any) -> None:
    """Those of a text become objects of their own."""
    if isinstance(value, str):
        limits().foresee(len(value) * ITEM_SIZE)
    elif isinstance(value, list | tuple | dict):
        text_size(value)


def _check_center(value: Any, width: Any = 80) -> None:
    limits().foresee(max(text_size(value), width))


def _check_indent(value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    text = _as_text(value)
    lines = len(text.splitlines()) if len(text) <= _LONG else len(text)
    limits().foresee(len(text) + (lines + 1) * (len(width) if isinstance(width, str) else width))


def _check_filter_join(value: Any, d: Any = "", attribute: Any = None) -> None:
    if isinstance(value, str | list | tuple | dict):
        limits().foresee(text_size(value) + len(value) * len(_as_text(d)))


def _check_format(value: Any, *arguments: Any, **named: Any) -> None:
    foresee_formatting(_as_text(value), named or arguments)


def _check_json(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> None:
    text_size(value)
    for spacing in (indent, *(separators or ())):
        if (len(spacing) if isinstance(spacing, str) else spacing or 0) > _MAX_INDENT:
            raise TemplateLimitError(f"tojson takes an indent and separators of at most {_MAX_INDENT}")


def _check_round(value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if abs(precision) > _MAX_DIGITS:
        raise TemplateLimitError(f"round takes at most {_MAX_DIGITS} digits")


def _check_sum(value: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise TemplateLimitError("sum adds numbers only")


def _check_batch(value: Any, size: Any = 1, *_: Any, **__: Any) -> None:
    _check_items(value)
    limits().foresee(size * ITEM_SIZE)


FILTERS: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(
        ("abs", "attr", "count", "d", "default", "first", "items", "last", "length", "map", "reject",
         "rejectattr", "select", "selectattr"),
        _check_nothing,
    ),
    **dict.fromkeys(
        ("capitalize", "e", "escape", "float", "forceescape", "int", "lower", "safe", "string",
         "trim", "truncate", "upper", "urlencode"),
        _check_text,
    ),
    **dict.fromkeys(
        ("dictsort", "groupby", "list", "max", "min", "reverse", "sort", "unique"), _check_items
    ),
    **dict.fromkeys(("title", "wordcount"), _check_words),
    "batch": _check_batch,
    "center": _check_center,
    "format": _check_format,
    "indent": _check_indent,
    "join": _check_filter_join,
    "replace": _check_replacement,
    "round": _check_round,
    "slice": _check_batch,
    "sum": _check_sum,
    "tojson": _check_json,
}  # fmt: skip
"""Those there are, with what is checked before each."""

_ITEM_FILTERS = frozenset(
    {
        "batch",
        "dictsort",
        "groupby",
        "join",
        "list",
        "max",
        "min",
        "reverse",
        "slice",
        "sort",
        "sum",
        "unique",
    }
)
"""Those that take all items of what they are given."""


def limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return limited(function, FILTERS[name], takes_items=name in _ITEM_FILTERS)


def limited(
    function: Callable[..., Any], check: Callable[..., None], *, takes_items: bool = False
) -> Callable[..., Any]:
    """A filter or test, with `check` before it. It gets the same arguments, but for Jinja's own."""
    place = 1 if hasattr(function, "jinja_pass_arg") else 0

    def call(*arguments: Any, **named: Any) -> Any:
        allowance = limits()
        allowance.tick()
        if takes_items and not isinstance(arguments[place], str | list | tuple | dict):
            items = list(allowance.ticking(arguments[place]))
            arguments = (*arguments[:place], allowance.charge(items), *arguments[place + 1 :])
        check(*arguments[place:], **named)
        result = function(*arguments, **named)
        return allowance.ticking(result) if isinstance(result, Iterator) else allowance.charge(result)

    return update_wrapper(call, function)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return str(value)
    text_size(value)
    return str(value)
