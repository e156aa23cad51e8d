"""float32 values as bytes of another type and order."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import attrs

from trioserve.server.protocol.pooling_fields import EmbedDtype, Endianness

if TYPE_CHECKING:
    from array import array

    from trioserve.server.protocol.pooling_fields import FormatFields

__all__ = ["NumberFormat"]

_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


@attrs.frozen
class NumberFormat:
    """How numbers are written where they are bytes."""

    dtype: EmbedDtype
    endianness: Endianness

    @classmethod
    def of(cls, request: FormatFields) -> NumberFormat:
        return cls(request.embed_dtype or "float32", request.endianness or "native")

    @property
    def size(self) -> int:
        """Of a value, in bytes."""
        return _SIZES[self.dtype]

    @property
    def is_cheap(self) -> bool:
        """Packing takes a microsecond; else it takes NumPy, which has to be imported first."""
        return self.dtype == "float32"

    def pack(self, values: array[float]) -> bytes:
        """`values` are float32. See `pack_narrow` for how the other types round them."""
        swaps = self.endianness not in {"native", sys.byteorder}
        if not self.is_cheap:
            from trioserve.server.pooling.narrow_numbers import pack_narrow  # noqa: PLC0415 - see there

            return pack_narrow(values, self.dtype, swaps=swaps)
        if swaps:
            values = values[:]
            values.byteswap()
        return values.tobytes()
