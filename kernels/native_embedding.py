"""Sums of embeddings on the CPU engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trioserve_kernels.native_structures import EmbeddingStructure

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from trioserve_kernels.native_encoder import NormWeights
    from trioserve_kernels.native_pool import ThreadPool

__all__ = ["NativeEmbedding"]


class NativeEmbedding:
    """The sum of rows of several tables (tokens, positions, types), normed or not.

    tables: float32 [., size] each; kept, and not copied if they are contiguous.
    norm: a LayerNorm of the sum; None: there is none.

    Raises:
      ValueError: no tables, or a size or dtype that is wrong.
    """

    def __init__(
        self,
        pool: ThreadPool,
        tables: Sequence[NDArray[np.float32]],
        norm: NormWeights | None = None,
        norm_eps: float = 1e-12,
    ) -> None:
        if not tables:
            msg = "tables is empty; there must be at least one"
            raise ValueError(msg)
        size = tables[0].shape[-1]
        for index, table in enumerate(tables):
            if table.dtype != np.float32 or table.ndim != 2 or table.shape[1] != size:
                msg = (
                    f"tables[{index}] is {table.dtype} {list(table.shape)}; it must be float32 [any, {size}]"
                )
                raise ValueError(msg)
        self.size = size
        self._pool = pool
        self._tables = [np.ascontiguousarray(table) for table in tables]
        self._norm = (None, None) if norm is None else norm.arrays("norm", size)
        self._norm_eps = norm_eps

    def __call__(self, *ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32 [T, size] from int32 [T] rows of each table, in the tables' order.

        Raises:
          ValueError: ids of another number, size or dtype, or a row that a table has not.
        """
        if len(ids) != len(self._tables):
            msg = f"ids of {len(ids)} tables are given; there are {len(self._tables)}"
            raise ValueError(msg)
        for index, (rows, table) in enumerate(zip(ids, self._tables, strict=True)):
            _check_ids(index, rows, len(ids[0]), len(table))
        out = np.empty((len(ids[0]), self.size), np.float32)
        if len(out):
            kept = [np.ascontiguousarray(rows) for rows in ids]
            parts = [
                EmbeddingStructure(table.ctypes.data, rows.ctypes.data)
                for table, rows in zip(self._tables, kept, strict=True)
            ]
            self._embed((EmbeddingStructure * len(parts))(*parts), out)
        return out

    def _embed(self, parts: ctypes.Array[EmbeddingStructure], out: NDArray[np.float32]) -> None:
        norm = [None if array is None else array.ctypes.data for array in self._norm]
        embed, pool = self._pool.library.functions.ts_embed, self._pool.handle
        embed(pool, parts, len(parts), self.size, *norm, self._norm_eps, len(out), out.ctypes.data)


def _check_ids(index: int, rows: NDArray[np.int32], count: int, table_rows: int) -> None:
    if rows.dtype != np.int32 or rows.shape != (count,):
        msg = f"ids[{index}] is {rows.dtype} {list(rows.shape)}; it must be int32 [{count}]"
        raise ValueError(msg)
    for wrong in (rows.min(initial=0), rows.max(initial=0)):
        if 0 <= wrong < table_rows:
            continue
        msg = f"ids[{index}] has {wrong}; it must be between 0 and {table_rows - 1}"
        raise ValueError(msg)
