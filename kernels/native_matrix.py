"""Matrices of weights, packed for the CPU engine's products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

import attrs
import numpy as np

from trioserve_kernels.native_object import NativeObject, address_of, check
from trioserve_kernels.native_structures import Format, Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trioserve_kernels.native_library import Library
    from trioserve_kernels.native_pool import ThreadPool

__all__ = ["PackedMatrix", "Placement", "dequantize", "row_bytes"]

_PANEL_ROWS: Final = 16
_ALL: Final = 2**31 - 1

# Values in a block, bytes of a block.
_BLOCKS: Final = {
    Source.F32: (1, 4),
    Source.BF16: (1, 2),
    Source.FP16: (1, 2),
    Source.Q8_0: (32, 34),
    Source.Q4_0: (32, 18),
    Source.Q4_1: (32, 20),
    Source.Q4_K: (256, 144),
    Source.Q6_K: (256, 210),
}

_DENSE: Final = {Format.F32, Format.BF16, Format.SPLIT}

# The formats that a source can be stored in.
_FORMATS: Final = {
    Source.F32: {*_DENSE, Format.Q8, Format.Q4},
    Source.BF16: {*_DENSE, Format.Q8, Format.Q4},
    Source.FP16: {*_DENSE, Format.Q8, Format.Q4},
    Source.Q8_0: {*_DENSE, Format.Q8},
    Source.Q4_0: {*_DENSE, Format.Q4},
    Source.Q4_1: {*_DENSE, Format.Q4},
    Source.Q4_K: {*_DENSE, Format.Q4_WIDE},
    Source.Q6_K: {*_DENSE, Format.Q8_16},
}


def row_bytes(source: Source, columns: int) -> int:
    """Bytes of a row of `columns` values.

    Raises:
      ValueError: the columns are not whole blocks.
    """
    values, size = _BLOCKS[source]
    if columns % values:
        msg = f"columns is {columns}; rows of {source.name} must have a multiple of {values}"
        raise ValueError(msg)
    return columns // values * size


def dequantize(
    library: Library, source: Source, blocks: NDArray[Any] | int, count: int
) -> NDArray[np.float32]:
    """The `count` values of GGUF blocks that lie one behind the other, fp32 [count].

    Raises:
      ValueError: count is not whole blocks, or an array has not the size of that many.
    """
    check("count", count, 0, 2**48)
    address = address_of("blocks", blocks, row_bytes(source, count)) if count else 0
    out = np.empty(count, np.float32)
    library.functions.ts_dequantize(source, address, count, out.ctypes.data)
    return out


@attrs.frozen
class Placement:
    """Row r of a source goes to row r // run * stride + offset + r % run of the segment."""

    run: int = _ALL
    stride: int = _ALL
    offset: int = 0

    @classmethod
    def gates(cls) -> Self:
        """Rows of gates, that interleave with those of `ups` by eights."""
        return cls(8, 16, 0)

    @classmethod
    def ups(cls) -> Self:
        """Rows of what the gates let through."""
        return cls(8, 16, 8)

    @property
    def numbers(self) -> tuple[int, int, int]:
        """As the library wants them."""
        return self.run, self.stride, self.offset

    def end(self, num_rows: int) -> int:
        """The first row behind those that `num_rows` rows go to."""
        last = num_rows - 1
        return last // self.run * self.stride + self.offset + last % self.run + 1

    def check(self, num_rows: int, rows: int) -> None:
        """Raise ValueError unless `num_rows` rows go to different ones of `rows` rows, in their order."""
        check("num_rows", num_rows, 1)
        check("run", self.run, 1)
        check("stride", self.stride, self.run)
        check("offset", self.offset, 0)
        if self.end(num_rows) > rows:
            msg = f"num_rows is {num_rows}: placed by {self} they end at row {self.end(num_rows)} of {rows}"
            raise ValueError(msg)


class PackedMatrix(NativeObject):
    """W and b of y = x W^T + b, in one or several segments of rows, each in a format of its own.

    Owns the packed weights, until `close`. What it is filled from is not needed any more afterwards.

    columns: inputs. All rows are zero until they are filled.

    Raises:
      ValueError: columns is not at least 1.
    """

    def __init__(self, library: Library, columns: int) -> None:
        check("columns", columns, 1, 2**24)
        functions = library.functions
        super().__init__(library, functions.ts_matrix_new(columns), functions.ts_matrix_free)
        self.columns = columns
        self.rows = 0
        self._segment_rows = 0
        self._format: Format | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the weights take."""
        return int(self.library.functions.ts_matrix_bytes(self.handle))

    def add_segment(self, form: Format, rows: int) -> None:
        """Have `rows` more rows, all zero, behind those that are there.

        Raises:
          ValueError: rows is not at least 1, or the segments before do not end at a multiple of 16.
        """
        check("rows", rows, 1, 2**26)
        if self.rows % _PANEL_ROWS:
            msg = f"{self.rows} rows are there; only behind a multiple of {_PANEL_ROWS} can a segment begin"
            raise ValueError(msg)
        self.library.functions.ts_matrix_add_segment(self.handle, form, rows)
        self.rows += rows
        self._segment_rows, self._format = rows, form

    def fill(
        self,
        pool: ThreadPool,
        source: Source,
        data: NDArray[Any] | int,
        num_rows: int,
        placement: Placement = Placement(),
    ) -> None:
        """Pack rows into the last segment, in the pool's threads.

        data: [num_rows, columns] numbers or blocks, contiguous: an array of any dtype with as many bytes, or
            an address. Blocks go only into the format that holds them without loss, or into F32, BF16 and
            SPLIT.

        Raises:
          ValueError: the rows do not fit the segment, the data not the rows, or the source not the format.
        """
        if self._format not in _FORMATS[source]:
            allowed = ", ".join(form.name for form in Format if form in _FORMATS[source])
            found = self._format.name if self._format is not None else "missing"
            msg = f"the segment's format is {found}; for rows of {source.name} it must be one of {allowed}"
            raise ValueError(msg)
        placement.check(num_rows, self._segment_rows)
        address = address_of("data", data, num_rows * row_bytes(source, self.columns))
        self.library.functions.ts_matrix_fill(
            self.handle, pool.handle, source, address, num_rows, *placement.numbers
        )

    def fill_bias(
        self,
        data: NDArray[np.float32] | int,
        num_rows: int,
        placement: Placement = Placement(),
    ) -> None:
        """Set b for rows of the last segment; it is zero elsewhere.

        data: fp32 [num_rows], an array or an address.

        Raises:
          ValueError: rows that do not fit the segment, or data of another size.
        """
        placement.check(num_rows, self._segment_rows)
        address = address_of("data", data, num_rows * 4)
        self.library.functions.ts_matrix_fill_bias(self.handle, address, num_rows, *placement.numbers)

    def unpack_row(self, row: int) -> NDArray[np.float32]:
        """A row of W, fp32 [columns].

        Raises:
          ValueError: there is no such row.
        """
        check("row", row, 0, self.rows - 1)
        out = np.empty(self.columns, np.float32)
        self.library.functions.ts_matrix_unpack_row(self.handle, row, out.ctypes.data)
        return out

    def multiply(self, pool: ThreadPool, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """x W^T + b: fp32 [num_rows, rows] from fp32 [num_rows, columns]. For tests and measurements.

        Raises:
          ValueError: x is of another shape or dtype, or not contiguous.
        """
        if x.ndim != 2 or x.shape[1] != self.columns or x.dtype != np.float32:
            msg = f"x is {x.dtype} {list(x.shape)}; it must be float32 [num_rows, {self.columns}]"
            raise ValueError(msg)
        address = address_of("x", x, x.nbytes)
        out = np.empty((len(x), self.rows), np.float32)
        if out.size:
            multiply = self.library.functions.ts_matrix_multiply
            multiply(self.handle, pool.handle, address, len(x), out.ctypes.data)
        return out
