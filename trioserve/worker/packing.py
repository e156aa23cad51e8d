"""From a checkpoint's tensors to packed matrices."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import attrs

from trioserve.config import ResolvedModel
from trioserve.worker.checkpoint import Blocks, Checkpoint, Stored
from trioserve_kernels.native import (
    Format,
    Library,
    PackedMatrix,
    Placement,
    Source,
    ThreadPool,
    gate_up_rows,
)

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MatrixPlan", "Packer"]

_PANEL_ROWS: Final = 16
"""Segments begin at multiples of it."""
_BLOCK_FORMATS: Final = {
    "Q8_0": Format.Q8,
    "Q4_0": Format.Q4,
    "Q4_1": Format.Q4,
    "Q4_K": Format.Q4_WIDE,
    "Q6_K": Format.Q8_16,
}
"""What holds each kind of blocks without loss."""
_DENSE_SOURCES: Final = {
    "float32": Source.F32,
    "bfloat16": Source.BF16,
    "float16": Source.FP16,
}


@attrs.frozen
class MatrixPlan:
    """y = x W^T + b, where W is made of one or several matrices of a checkpoint, and b of their biases."""

    columns: int
    parts: Mapping[str, int]
    """Name in the checkpoint, without `.weight` and `.bias` -> rows."""
    is_gate_up: bool = False
    """False: one part below the other; True: two parts, interleaved by eights of their rows."""
    has_bias: bool = False
    is_table: bool = False
    """An embedding or output matrix: 4 bits are too few for it."""

    @property
    def rows(self) -> int:
        return gate_up_rows(max(self.parts.values())) if self.is_gate_up else sum(self.parts.values())

    def placements(self) -> list[Placement]:
        """Of each part's rows."""
        if self.is_gate_up:
            return [Placement.gates(), Placement.ups()]
        placements, offset = [], 0
        for rows in self.parts.values():
            placements.append(Placement(offset=offset))
            offset += rows
        return placements

    def can_be_cut(self) -> bool:
        """Can each part be a segment?"""
        return not self.is_gate_up and all(rows % _PANEL_ROWS == 0 for rows in list(self.parts.values())[:-1])


@attrs.frozen
class _Part:
    name: str
    stored: Stored
    format: Format


@attrs.frozen
class Packer:
    """Packs in a pool's threads. What it makes is closed with `owner`."""

    model: ResolvedModel
    """Of it, `dtype` and `quantization`."""
    library: Library
    pool: ThreadPool
    checkpoint: Checkpoint
    owner: ExitStack

    def pack(self, plan: MatrixPlan) -> PackedMatrix:
        """Blocks keep their numbers; dense parts are rounded to the model's dtype, or quantized if that was
        asked for. Where parts of different formats cannot be told apart, all are rounded to the dtype.

        Raises:
          ModelNotSupportedError, ModelSourceError: see `Checkpoint.get`.
        """
        parts = [self._read(name, rows, plan) for name, rows in plan.parts.items()]
        matrix = self.owner.enter_context(PackedMatrix(self.library, plan.columns))
        formats = {part.format for part in parts}
        if len(formats) > 1 and plan.can_be_cut():
            for part in parts:
                matrix.add_segment(part.format, part.stored.shape[0])
                self._fill(matrix, part, Placement(), has_bias=plan.has_bias)
        else:
            matrix.add_segment(self._dense_format if len(formats) > 1 else parts[0].format, plan.rows)
            for part, placement in zip(parts, plan.placements(), strict=True):
                self._fill(matrix, part, placement, has_bias=plan.has_bias)
        return matrix

    def _read(self, name: str, rows: int, plan: MatrixPlan) -> _Part:
        stored = self.checkpoint.get(f"{name}.weight", [rows, plan.columns])
        return _Part(name, stored, self._format(stored, is_table=plan.is_table))

    def _format(self, stored: Stored, *, is_table: bool) -> Format:
        if self.model.dtype == "float32" or self.model.quantization == "none":
            return self._dense_format
        if isinstance(stored, Blocks):
            return _BLOCK_FORMATS[stored.kind]
        if self.model.quantization == "int8" or (self.model.quantization == "int4" and is_table):
            return Format.Q8
        return Format.Q4 if self.model.quantization == "int4" else self._dense_format

    @property
    def _dense_format(self) -> Format:
        return Format.F32 if self.model.dtype == "float32" else Format.BF16

    def _fill(self, matrix: PackedMatrix, part: _Part, placement: Placement, *, has_bias: bool) -> None:
        rows = part.stored.shape[0]
        source, data = _source(part.stored)
        matrix.fill(self.pool, source, data.ctypes.data, rows, placement)
        if has_bias:
            bias = self.checkpoint.get(f"{part.name}.bias", [rows])
            assert not isinstance(bias, Blocks), "blocks are matrices"
            matrix.fill_bias(bias.to_float32(), rows, placement)


def _source(stored: Stored) -> tuple[Source, np.ndarray]:
    """The data is contiguous."""
    if isinstance(stored, Blocks):
        return Source[stored.kind], stored.data
    if stored.dtype not in _DENSE_SOURCES:
        return Source.F32, stored.to_float32()
    return _DENSE_SOURCES[stored.dtype], stored.data
