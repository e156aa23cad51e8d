"""The CPU engine's decoder: all layers of a step in one call."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve_kernels.native_matrix import PackedMatrix
from trioserve_kernels.native_object import NativeObject, address_of, check
from trioserve_kernels.native_structures import (
    Activation,
    Element,
    KvFormat,
    LayerStructure,
    Phase,
    ShapeStructure,
    StepStructure,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve_kernels.native_pool import ThreadPool

__all__ = ["Decoder", "DecoderLayer", "DecoderShape", "step_of"]

_PAGE_TOKENS: Final = 16
_ALIGNMENT: Final = 64


@attrs.frozen(kw_only=True)
class DecoderShape:
    """A decoder's sizes, and what differs between architectures.

    block_size: tokens in a block of the KV cache, a multiple of 16.
    num_groups: groups of layers, each with a block table of its own; group_places: layers at most in a group.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    activation: Activation
    element: Element
    kv_format: KvFormat
    block_size: int
    num_groups: int
    group_places: int
    rms_norm_eps: float
    attention_scale: float
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0
    """0: none."""

    def check(self) -> None:
        """Raise ValueError where a field is out of range."""
        for field, low, multiple in (
            ("hidden_size", 2, 2),
            ("intermediate_size", 1, 1),
            ("num_kv_heads", 1, 1),
            ("num_heads", self.num_kv_heads, self.num_kv_heads),
            ("head_dim", 2, 2),
            ("vocab_size", 1, 1),
            ("block_size", _PAGE_TOKENS, _PAGE_TOKENS),
            ("num_groups", 1, 1),
            ("group_places", 1, 1),
        ):
            value = getattr(self, field)
            check(field, value, low)
            if value % multiple:
                msg = f"{field} is {value}; it must be a multiple of {multiple}"
                raise ValueError(msg)

    def structure(self, num_layers: int) -> ShapeStructure:
        return ShapeStructure(**attrs.asdict(self), num_layers=num_layers)


@attrs.frozen(kw_only=True, eq=False)
class DecoderLayer:
    """A layer's weights. Norms' weights are fp32 with their offset added; None where there is no such norm.

    qkv: rows of all query heads, then key heads, then value heads.
    gate_up: `gate_up_rows(intermediate_size)` rows, placed by `Placement.gates` and `Placement.ups`.
    rotary_frequencies: fp32 [head_dim / 2], in radians per token.
    window: tokens that a query sees, its own included; None: all.
    group, place: where the layer's keys and values are in the cache.
    """

    qkv: PackedMatrix
    output: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix
    attention_norm: NDArray[np.float32]
    mlp_norm: NDArray[np.float32]
    attention_output_norm: NDArray[np.float32] | None = None
    mlp_output_norm: NDArray[np.float32] | None = None
    query_norm: NDArray[np.float32] | None = None
    key_norm: NDArray[np.float32] | None = None
    rotary_frequencies: NDArray[np.float32]
    window: int | None = None
    group: int = 0
    place: int = 0

    def check(self, shape: DecoderShape) -> None:
        """Raise ValueError where a size does not fit the shape."""
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        attended = shape.num_heads * shape.head_dim
        check_matrix("qkv", self.qkv, heads, shape.hidden_size)
        check_matrix("output", self.output, shape.hidden_size, attended)
        check_matrix("gate_up", self.gate_up, gate_up_rows(shape.intermediate_size), shape.hidden_size)
        check_matrix("down", self.down, shape.hidden_size, shape.intermediate_size)
        check("window", 1 if self.window is None else self.window, 1)
        check("group", self.group, 0, shape.num_groups - 1)
        check("place", self.place, 0, shape.group_places - 1)

    def structure(self, shape: DecoderShape) -> LayerStructure:
        hidden, head = shape.hidden_size, shape.head_dim
        return LayerStructure(
            qkv=self.qkv.handle,
            output=self.output.handle,
            gate_up=self.gate_up.handle,
            down=self.down.handle,
            attention_norm=vector("attention_norm", self.attention_norm, hidden),
            mlp_norm=vector("mlp_norm", self.mlp_norm, hidden),
            attention_output_norm=vector("attention_output_norm", self.attention_output_norm, hidden),
            mlp_output_norm=vector("mlp_output_norm", self.mlp_output_norm, hidden),
            query_norm=vector("query_norm", self.query_norm, head),
            key_norm=vector("key_norm", self.key_norm, head),
            rotary_frequencies=vector("rotary_frequencies", self.rotary_frequencies, head // 2),
            window=self.window or 0,
            group=self.group,
            place=self.place,
        )


def gate_up_rows(intermediate_size: int) -> int:
    """Rows of a matrix whose gate and up rows interleave by eights."""
    return (intermediate_size + 7) // 8 * 16


def check_matrix(field: str, matrix: PackedMatrix, rows: int, columns: int) -> None:
    """Raise ValueError unless it has that size."""
    if (matrix.rows, matrix.columns) != (rows, columns):
        msg = f"{field} is [{matrix.rows}, {matrix.columns}]; it must be [{rows}, {columns}]"
        raise ValueError(msg)


def vector(field: str, values: NDArray[np.float32] | None, size: int) -> int | None:
    """Where the fp32 [size] values are."""
    if values is None:
        return None
    if values.dtype != np.float32:
        msg = f"{field} is {values.dtype}; it must be float32"
        raise ValueError(msg)
    return address_of(field, values, size * 4)


def step_of(
    token_ids: NDArray[np.int32],
    positions: NDArray[np.int32],
    starts: NDArray[np.int32],
    block_tables: NDArray[np.int32],
) -> StepStructure:
    """A step of T tokens of S sequences, laid end to end. The arrays must outlive it.

    token_ids, positions: [T]; starts: [S + 1]; block_tables: [groups, S, width]; all int32.

    Raises:
      ValueError: an array of another dtype or size.
    """
    tokens, sequences, width = len(token_ids), len(starts) - 1, block_tables.shape[-1]
    fields: dict[str, Any] = {"num_tokens": tokens, "num_sequences": sequences, "table_width": width}
    for field, array, size in (
        ("token_ids", token_ids, tokens),
        ("positions", positions, tokens),
        ("starts", starts, sequences + 1),
        ("block_tables", block_tables, len(block_tables) * sequences * width),
    ):
        if array.dtype != np.int32:
            msg = f"{field} is {array.dtype}; it must be int32"
            raise ValueError(msg)
        fields[field] = address_of(field, array, size * 4)
    return StepStructure(**fields)


class Decoder(NativeObject):
    """Runs the layers of a model (`cpu/decoder.h`).

    Owns its own working memory. Keeps the pool, the matrices, the norms and the cache, but does not close
    them: close the decoder first.

    `forward` and `logits` are called once or twice a step: they take addresses and trust them.

    Raises:
      ValueError: a size that is out of range, or does not fit the others.
    """

    def __init__(
        self,
        pool: ThreadPool,
        shape: DecoderShape,
        *,
        embedding: PackedMatrix,
        head: PackedMatrix,
        final_norm: NDArray[np.float32],
        layers: Sequence[DecoderLayer],
    ) -> None:
        shape.check()
        check_matrix("embedding", embedding, shape.vocab_size, shape.hidden_size)
        check_matrix("head", head, shape.vocab_size, shape.hidden_size)
        for layer in layers:
            layer.check(shape)
        functions = pool.library.functions
        handle = functions.ts_decoder_new(
            shape.structure(len(layers)),
            pool.handle,
            embedding.handle,
            head.handle,
            vector("final_norm", final_norm, shape.hidden_size),
            (LayerStructure * len(layers))(*(layer.structure(shape) for layer in layers)),
        )
        super().__init__(pool.library, handle, functions.ts_decoder_free)
        self.shape = shape
        self.num_layers = len(layers)
        self._parts = (pool, embedding, head, final_norm, tuple(layers))
        self._cache: NDArray[np.uint8] | None = None
        self._forward = functions.ts_decoder_forward
        self._logits = functions.ts_decoder_logits

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the KV cache: `block_size` tokens in all layers of a group."""
        return int(self.library.functions.ts_decoder_block_bytes(self.handle))

    def set_cache(self, cache: NDArray[np.uint8] | int, num_blocks: int) -> None:
        """Use this memory for keys and values: num_blocks * block_bytes bytes, zeroed, aligned to 64.

        Raises:
          ValueError: an array of another size, or not aligned.
        """
        check("num_blocks", num_blocks, 1)
        address = address_of("cache", cache, num_blocks * self.block_bytes)
        if address % _ALIGNMENT:
            msg = f"cache is at address {address:#x}; it must be a multiple of {_ALIGNMENT}"
            raise ValueError(msg)
        self._cache = None if isinstance(cache, int) else cache
        self.library.functions.ts_decoder_set_cache(self.handle, address)

    def forward(self, step: StepStructure, hidden: int) -> None:
        """Run a step. hidden: address of fp32 [T, hidden_size], what comes out of the last norm."""
        self._forward(self.handle, ctypes.byref(step), hidden)

    def forward_layers(self, step: StepStructure, num_layers: int, hidden: int) -> None:
        """Run only the first layers, without the last norm: for tests.

        Raises:
          ValueError: there are not so many layers.
        """
        check("num_layers", num_layers, 0, self.num_layers)
        self.library.functions.ts_decoder_forward_layers(self.handle, ctypes.byref(step), num_layers, hidden)

    def logits(
        self,
        hidden: int,
        rows: int,
        num_rows: int,
        *,
        out: int | None = None,
        highest_ids: int | None = None,
    ) -> None:
        """Logits of rows of `hidden`, all by addresses.

        hidden: fp32 [., hidden_size]; rows: int32 [num_rows].
        out: fp32 [num_rows, vocab_size]; None: not wanted.
        highest_ids: int32 [num_rows], of the largest logit, the lowest id of equals, -1 if a logit is not
        finite; None: not wanted.
        """
        self._logits(self.handle, hidden, rows, num_rows, out, highest_ids)

    def take_times(self) -> dict[Phase, float]:
        """Seconds that the calling thread spent in each phase since the last call."""
        seconds = (ctypes.c_double * len(Phase))()
        self.library.functions.ts_decoder_times(self.handle, seconds)
        return {phase: seconds[phase] for phase in Phase}
