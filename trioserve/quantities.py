"""Numbers as people write them: `8k` tokens, `2GiB` of memory, `auto`."""

from __future__ import annotations

import re

__all__ = ["parse_quantity"]

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
_QUANTITY = re.compile(r"(-?\d+(?:\.\d+)?)\s*([kmgtKMGT]?)(i?[bB]?)")


def parse_quantity(value: int | str) -> int:
    """An integer, from an integer or from text.

    `8k` is 8,000 and `8K` or `8Ki` is 8,192 (as in vLLM's flags); a fraction is fine where the result is
    whole (`1.5k`).

    Raises:
      ValueError: it is neither, or not a whole number.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"not a whole number such as 4096, 8k or 2GiB: {value!r}")
    number, unit, suffix = match.groups()
    if suffix.startswith("i"):
        unit = unit.upper()
    amount = float(number) * _UNITS[unit]
    if not amount.is_integer():
        raise ValueError(f"not a whole number: {value!r}")
    return int(amount)
