"""Values that are no JSON yet, as JSON text."""

from __future__ import annotations

import json
from typing import Any

from trioserve.text import is_unicode

__all__ = ["escaped", "to_json"]


def to_json(value: Any) -> str:
    """Raises ValueError: JSON cannot express it (an infinite number, say); RecursionError: it is too deep."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value, allow_nan=False)


def escaped(text: str) -> str:
    """As it stands within a string of JSON. Pieces of a text may be escaped one by one."""
    return to_json(text)[1:-1]
