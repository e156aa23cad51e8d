"""float32 values as numbers of fewer bits. NumPy is imported here: a tenth of a second, and 20 MB, that few
servers need."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from array import array

    from trioserve.server.protocol.pooling_fields import EmbedDtype

__all__ = ["pack_narrow", "pack_signs"]

_Array = np.ndarray[Any, np.dtype[Any]]


def pack_narrow(values: array[float], dtype: EmbedDtype, *, swaps: bool) -> bytes:
    """Each rounded to the nearest number of the type, of two that are equally near to the one whose last bit
    is 0. What float16 and bfloat16 have no room for is infinite; fp8 has its highest number for that.

    swaps: the bytes are not in this machine's order.
    """
    given: _Array = np.frombuffer(values, dtype="float32")
    match dtype:
        case "float16":
            with np.errstate(over="ignore"):
                packed: _Array = given.astype("float16")
        case "bfloat16":
            packed = _to_bfloat16(given)
        case "fp8_e4m3":
            packed = _to_fp8(given, 4, 0x7E)  # OCP's: no infinity, 448 is the highest
        case "fp8_e5m2":
            packed = _to_fp8(given, 5, 0x7B)  # 57344
        case "float32":
            packed = given
    return (packed.byteswap() if swaps else packed).tobytes()


def pack_signs(values: array[float]) -> bytes:
    """A bit per value: 1 where it is above 0; the first value is the highest bit of the first byte. Where
    they are no multiple of 8, the last byte is filled up with 0."""
    return np.packbits(np.frombuffer(values, dtype="float32") > 0).tobytes()


def _to_bfloat16(values: _Array) -> _Array:
    """NumPy has no such type: the result is its bits."""
    bits = values.view("uint32")
    rounded: _Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("uint16")
    return rounded


def _to_fp8(values: _Array, exponent_bits: int, highest: int) -> _Array:
    """Codes of 8 bits; `highest` is that of the highest number."""
    known = _magnitudes(exponent_bits, highest)
    magnitudes = np.minimum(np.abs(values), known[-1])
    above = np.searchsorted(known, magnitudes)
    below = np.maximum(above - 1, 0)
    to_above, to_below = known[above] - magnitudes, magnitudes - known[below]
    is_below = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    codes: _Array = np.where(is_below, below, above).astype("uint8")
    signed: _Array = codes | (np.signbit(values).astype("uint8") << 7)
    return signed


@cache
def _magnitudes(exponent_bits: int, highest: int) -> _Array:
    """The numbers with the codes 0 to `highest`, which are IEEE 754's for that many bits of exponent."""
    mantissa_bits = 7 - exponent_bits
    codes = np.arange(highest + 1)
    exponents, mantissas = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fractions = mantissas / (1 << mantissa_bits) + (exponents > 0)
    bias = (1 << (exponent_bits - 1)) - 1
    numbers: _Array = np.ldexp(fractions, np.maximum(exponents, 1) - bias)
    return numbers
