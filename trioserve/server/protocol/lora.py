"""Requests to load and unload LoRA adapters, as vLLM has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.lora_request import LoRARequest
from trioserve.server.protocol.reading import RequestReader
from trioserve.server.protocol.refusals import Refusal

if TYPE_CHECKING:
    from trioserve.server.protocol.reading import Problem

__all__ = ["LOAD_LORA_READER", "UNLOAD_LORA_READER", "LoadLoRARequest", "UnloadLoRARequest"]

_FIELDS = attrs.fields_dict(LoRARequest)


@attrs.frozen(kw_only=True)
class LoadLoRARequest:
    lora_name: str
    lora_path: str
    """A directory of the server's machine."""
    load_inplace: bool | None = None
    """If there is one of this name: read it again, in its place."""
    model: str | None = None
    """Which it is an adapter of, where there are several."""


@attrs.frozen(kw_only=True)
class UnloadLoRARequest:
    lora_name: str
    lora_int_id: int | None = None
    """Has no meaning here."""


def _no_conflicts(_: LoadLoRARequest | UnloadLoRARequest) -> list[Problem]:
    return []


LOAD_LORA_READER = RequestReader(
    kind=LoadLoRARequest,
    ranges={name: _FIELDS[name] for name in ("lora_name", "lora_path")},
    refusals=(Refusal("is_3d_lora_weight", "false or null", (False,)),),
    conflicts=_no_conflicts,
)

UNLOAD_LORA_READER = RequestReader(
    kind=UnloadLoRARequest,
    ranges={"lora_name": _FIELDS["lora_name"]},
    refusals=(),
    conflicts=_no_conflicts,
)
