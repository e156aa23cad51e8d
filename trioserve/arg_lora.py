"""How adapters are named on a command line, in JSON and in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.arg_fields import fail, nested
from trioserve.config import LoRAModule
from trioserve.errors import InvalidRequestError
from trioserve.lora_request import LoRARequest

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["lora_modules"]

_ALLOWED = 'NAME=PATH or JSON such as {"name": "sql", "path": "sql-lora"}, of printable characters'
_from_json = nested("lora_modules", LoRAModule)


def lora_modules(value: str | Iterable[Any] | None) -> tuple[LoRAModule, ...]:
    """Each as `name=path`, JSON, a dict or a `LoRAModule`.

    Raises:
      InvalidConfigError: one is none of these, or two have the same name.
    """
    given = (value,) if isinstance(value, str | dict) else tuple(value or ())
    modules = tuple(map(_to_module, given))
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise fail("lora_modules", name, "a list of different names")
    return modules


def _to_module(given: Any) -> LoRAModule:
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        name, _, path = given.partition("=")
        module = LoRAModule(name=name, path=path)
    else:
        module = _from_json(given)
    try:
        LoRARequest(module.name, lora_path=module.path, base_model_name=module.base_model_name)
    except InvalidRequestError:  # what no request could name
        raise fail("lora_modules", given, _ALLOWED) from None
    return module
