"""Which LoRA adapter a request wants."""

from __future__ import annotations

import os
from typing import Any

import attrs

from trioserve.validators import boolean, integer, optional, reject

__all__ = ["LoRARequest"]

_MAX_LENGTH = 1024


def _text(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_LENGTH or not value.isprintable():
        raise reject(attribute, value, f"1 to {_MAX_LENGTH} printable characters")


def _to_text(path: Any) -> Any:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


@attrs.frozen
class LoRARequest:
    """An adapter by its name; the fields are in vLLM's order.

    Wrong values raise `InvalidRequestError`, which names the field.
    """

    lora_name: str = attrs.field(validator=_text)
    lora_int_id: int | None = attrs.field(
        default=None, validator=optional(integer("null or an integer >= 1", least=1))
    )
    """Has no meaning here: names tell adapters apart."""
    lora_path: str | None = attrs.field(default=None, converter=_to_text, validator=optional(_text))
    """A directory in PEFT's layout, from which it is loaded if it is not there yet; None: it is."""
    base_model_name: str | None = attrs.field(default=None, validator=optional(_text))
    """Whose child `/v1/models` shows; None: the model's first name."""
    load_inplace: bool = attrs.field(default=False, validator=boolean)
    """Where it is loaded: read its files again. Requests that have the old one keep it to their end."""
