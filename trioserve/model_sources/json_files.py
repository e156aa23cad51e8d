"""JSON files of models, read strictly enough to name what is wrong with them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from trioserve.errors import ModelSourceError
from trioserve.structuring import find_problems, make_converter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["read_json", "read_json_list", "structure", "write_json"]

T = TypeVar("T")

_converter = make_converter(forbid_extra_keys=False)


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The JSON object in a file; {} for one that may be missing and is.

    Raises:
      ModelSourceError: it cannot be read, or holds no JSON object.
    """
    try:
        value = _load(path)
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise ModelSourceError(f"There is no {path}.") from None
    if not isinstance(value, dict):
        raise ModelSourceError(f"{path} must hold a JSON object, and holds a {type(value).__name__}.")
    return value


def read_json_list(path: Path) -> list[Any] | None:
    """The JSON list in a file; None if there is no such file. Raises as `read_json`."""
    try:
        value = _load(path)
    except FileNotFoundError:
        return None
    if not isinstance(value, list):
        raise ModelSourceError(f"{path} must hold a JSON list, and holds a {type(value).__name__}.")
    return value


def structure(values: Mapping[str, Any] | list[Any], kind: type[T], path: Path) -> T:
    """The keys that `kind` has; others are ignored.

    Raises:
      ModelSourceError: some are missing or wrong; names them all, and the file.
    """
    try:
        return _converter.structure(values, kind)
    except Exception as error:  # cattrs raises groups of anything; each leaf becomes a line
        problems = "; ".join(f"{problem.path} {problem.message}" for problem in find_problems(error))
        raise ModelSourceError(f"{path}: {problems}.") from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """For people to read, too."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _load(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{path} cannot be read as JSON: {error}.") from None
