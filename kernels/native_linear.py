"""Linear maps on the CPU engine: weights packed once, applied to any number of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve_kernels.native_matrix import PackedMatrix, Placement
from trioserve_kernels.native_structures import Element, Format, Source

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from trioserve_kernels.native_library import Library
    from trioserve_kernels.native_pool import ThreadPool

__all__ = ["LinearWeights", "NativeLinear", "packed", "weights_format"]


@attrs.frozen(eq=False)
class LinearWeights:
    """W and b of y = x W^T + b: float32 [out, in] and [out], as checkpoints have them. b None: zero."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None = None

    def check(self, field: str, rows: int | None = None, columns: int | None = None) -> None:
        """Raise ValueError where a dtype or a size is wrong; None: any size."""
        weight, bias = self.weight, self.bias
        if weight.dtype != np.float32 or weight.ndim != 2 or not _fits(weight.shape, (rows, columns)):
            wanted = ", ".join("any" if size is None else str(size) for size in (rows, columns))
            msg = f"{field}'s weight is {weight.dtype} {list(weight.shape)}; it must be float32 [{wanted}]"
            raise ValueError(msg)
        if bias is not None and (bias.dtype != np.float32 or bias.shape != (len(weight),)):
            msg = f"{field}'s bias is {bias.dtype} {list(bias.shape)}; it must be float32 [{len(weight)}]"
            raise ValueError(msg)


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return all(need in {None, size} for size, need in zip(shape, wanted, strict=True))


def weights_format(library: Library, element: Element) -> Format:
    """How weights are stored for products of an element's exactness: the fastest way on this tier."""
    if element is Element.BF16:
        return Format.BF16
    return Format.SPLIT if library.tier == "amx" else Format.F32


def packed(pool: ThreadPool, element: Element, field: str, parts: Sequence[LinearWeights]) -> PackedMatrix:
    """One matrix of several, their outputs behind one another; to be closed.

    Raises:
      ValueError: a dtype or a size that is wrong, or parts of different numbers of inputs.
    """
    columns = parts[0].weight.shape[-1]
    for part in parts:
        part.check(field, columns=columns)
    matrix = PackedMatrix(pool.library, columns)
    matrix.add_segment(weights_format(pool.library, element), sum(len(part.weight) for part in parts))
    offset = 0
    for part in parts:
        rows, place = len(part.weight), Placement(offset=offset)
        matrix.fill(pool, Source.F32, np.ascontiguousarray(part.weight), rows, place)
        if part.bias is not None:
            matrix.fill_bias(np.ascontiguousarray(part.bias), rows, place)
        offset += rows
    return matrix


class NativeLinear:
    """y = x W^T + b on the pool's threads, as exact as float32 (or bfloat16, if element says so).

    Owns the packed weights, until `close`; the arrays it is made from are not needed any more afterwards. A
    row of y depends on its row of x alone, to the bit. To be used by one thread at a time.

    Raises:
      ValueError: a dtype or a size that is wrong.
    """

    def __init__(self, pool: ThreadPool, weights: LinearWeights, element: Element = Element.F32) -> None:
        self._pool = pool
        self._matrix = packed(pool, element, "linear", [weights])

    @property
    def in_features(self) -> int:
        return self._matrix.columns

    @property
    def out_features(self) -> int:
        return self._matrix.rows

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the weights take."""
        return self._matrix.nbytes

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32 [T, out] from float32 [T, in], contiguous.

        Raises:
          ValueError: x is of another shape or dtype, or not contiguous.
        """
        return self._matrix.multiply(self._pool, x)

    def close(self) -> None:
        """Give back the weights. Once closed it stays closed."""
        self._matrix.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
