"""The fields of a form as what JSON would have: a form has texts only."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["typed_values"]

_NUMERAL = re.compile(r"[+-]?[0-9]{1,30}")
_DECIMAL = re.compile(r"[+-]?([0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][+-]?[0-9]{1,3})?")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def typed_values(fields: Mapping[str, Sequence[str]], kind: type) -> dict[str, Any]:
    """What `fields` mean for the attrs class `kind`, by the types of its fields. What has another type stays
    a text, for whoever checks it to refuse; what is empty was not given. A list may be named with `[]`."""
    hints = get_type_hints(kind)
    known = {field.name: hints[field.name] for field in attrs.fields(kind)}
    values: dict[str, Any] = {}
    for given, all_texts in fields.items():
        name, texts = given.removesuffix("[]"), [text for text in all_texts if text]
        if not texts:
            continue
        if name not in known:
            values[name] = [_guess(text) for text in texts] if given != name else _guess(texts[-1])
        elif _holds_list(known[name]):
            values[name] = [*values.get(name, ()), *texts]
        else:
            values[name] = _convert(texts[0], known[name]) if len(texts) == 1 else texts
    return values


def _holds_list(hint: Any) -> bool:
    return any(get_origin(part) is list for part in (hint, *get_args(hint)))


def _convert(text: str, hint: Any) -> Any:
    kinds = {hint, *get_args(hint)}
    if bool in kinds:
        return _BOOLEANS.get(text.lower(), text)
    if int in kinds and _NUMERAL.fullmatch(text):
        return int(text)
    if float in kinds and _DECIMAL.fullmatch(text):
        return float(text)
    return text


def _guess(text: str) -> Any:
    """Of a field that the class does not have."""
    if text in {"true", "false"}:
        return _BOOLEANS[text]
    return int(text) if _NUMERAL.fullmatch(text) else text
