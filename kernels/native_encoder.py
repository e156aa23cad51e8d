"""The CPU engine's encoder: all layers of whole texts in one call, for BERT, Whisper and their like."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from itertools import accumulate
from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve_kernels.native_linear import LinearWeights, packed
from trioserve_kernels.native_object import NativeObject, check
from trioserve_kernels.native_structures import (
    Activation,
    Element,
    EncoderLayerStructure,
    EncoderShapeStructure,
    Phase,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve_kernels.native_matrix import PackedMatrix
    from trioserve_kernels.native_pool import ThreadPool

__all__ = ["EncoderLayer", "EncoderShape", "NativeEncoder", "NormWeights"]


@attrs.frozen(kw_only=True)
class EncoderShape:
    """An encoder's sizes, and what differs between architectures.

    pre_norm: norms come before each product (Whisper), not behind each sum (BERT).
    element: what products are as exact as. F32: float32; BF16: weights and activations are rounded to
    bfloat16, sums are not.
    """

    hidden_size: int
    num_heads: int
    intermediate_size: int
    norm_eps: float
    activation: Activation = Activation.GELU
    pre_norm: bool = False
    element: Element = Element.F32

    def check(self) -> None:
        """Raise ValueError where a field is out of range."""
        check("num_heads", self.num_heads, 1)
        check("hidden_size", self.hidden_size, self.num_heads)
        check("intermediate_size", self.intermediate_size, 1)
        if self.hidden_size % self.num_heads:
            msg = f"hidden_size is {self.hidden_size}; it must be a multiple of num_heads, {self.num_heads}"
            raise ValueError(msg)
        if self.activation is Activation.SILU:
            msg = "activation is SILU; it must be GELU, GELU_TANH or RELU"
            raise ValueError(msg)

    def structure(self, num_layers: int) -> EncoderShapeStructure:
        fields = attrs.asdict(self)
        del fields["element"]
        return EncoderShapeStructure(**fields, num_layers=num_layers)


@attrs.frozen(eq=False)
class NormWeights:
    """Of a LayerNorm: float32 [hidden_size] both. bias None: zero."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None = None

    def arrays(self, field: str, size: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Both, contiguous.

        Raises:
          ValueError: another dtype or size.
        """
        bias = np.zeros(size, np.float32) if self.bias is None else self.bias
        for name, values in (("weight", self.weight), ("bias", bias)):
            if values.dtype != np.float32 or values.shape != (size,):
                msg = f"{field}'s {name} is {values.dtype} {list(values.shape)}; it must be float32 [{size}]"
                raise ValueError(msg)
        return np.ascontiguousarray(self.weight), np.ascontiguousarray(bias)


@attrs.frozen(kw_only=True, eq=False)
class EncoderLayer:
    """A layer's weights, as checkpoints have them.

    query, key, value, output: [hidden_size, hidden_size]; up: [intermediate_size, hidden_size]; down:
    [hidden_size, intermediate_size].
    attention_norm: behind attention's sum, or before query, key and value (`pre_norm`); mlp_norm likewise.
    """

    query: LinearWeights
    key: LinearWeights
    value: LinearWeights
    output: LinearWeights
    attention_norm: NormWeights
    up: LinearWeights
    down: LinearWeights
    mlp_norm: NormWeights

    def check(self, shape: EncoderShape) -> None:
        """Raise ValueError where a dtype or a size does not fit the shape."""
        hidden, inner = shape.hidden_size, shape.intermediate_size
        for field in ("query", "key", "value", "output"):
            getattr(self, field).check(field, hidden, hidden)
        self.up.check("up", inner, hidden)
        self.down.check("down", hidden, inner)


class NativeEncoder(NativeObject):
    """Runs the layers of an encoder on whole texts (`cpu/encoder.h`).

    Owns the packed weights and its own working memory, until `close`; the arrays it is made from are not
    needed any more afterwards. Keeps the pool, but does not close it: close the encoder first. To be used by
    one thread at a time.

    final_norm: behind the last layer; None: there is none.

    Raises:
      ValueError: no layers, or a size or dtype that is wrong.
    """

    def __init__(
        self,
        pool: ThreadPool,
        shape: EncoderShape,
        layers: Sequence[EncoderLayer],
        final_norm: NormWeights | None = None,
    ) -> None:
        shape.check()
        check("num_layers", len(layers), 1)
        for layer in layers:
            layer.check(shape)
        functions = pool.library.functions
        self._kept: list[NDArray[np.float32]] = []
        self._matrices: list[PackedMatrix] = []
        self.shape = shape
        self._pool = pool
        self._forward = functions.ts_encoder_forward
        with ExitStack() as undo:
            undo.callback(self._close_weights)
            structures = [self._layer(layer) for layer in layers]
            handle = functions.ts_encoder_new(
                shape.structure(len(layers)),
                pool.handle,
                (EncoderLayerStructure * len(layers))(*structures),
                *((None, None) if final_norm is None else self._norm("final_norm", final_norm)),
            )
            undo.pop_all()
        super().__init__(pool.library, handle, functions.ts_encoder_free)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the weights take."""
        return sum(matrix.nbytes for matrix in self._matrices) + sum(array.nbytes for array in self._kept)

    def forward(self, hidden: NDArray[np.float32], lengths: Sequence[int]) -> NDArray[np.float32]:
        """What comes out of all layers: float32 [T, hidden_size].

        hidden: float32 [T, hidden_size], embeddings of texts laid end to end; not changed.
        lengths: tokens of each text, at least 1 each; T together.

        A text's result depends on its own rows alone, to the bit. Blocks, and lets other Python threads run.

        Raises:
          ValueError: lengths that are not T together, or hidden of another shape or dtype.
        """
        if hidden.dtype != np.float32 or hidden.ndim != 2 or hidden.shape[1] != self.shape.hidden_size:
            msg = (
                f"hidden is {hidden.dtype} {list(hidden.shape)}; "
                f"it must be float32 [tokens, {self.shape.hidden_size}]"
            )
            raise ValueError(msg)
        out = hidden.copy(order="C")
        self.forward_in_place(out, lengths)
        return out

    def forward_in_place(self, hidden: NDArray[np.float32], lengths: Sequence[int]) -> None:
        """Like `forward`, into `hidden`, which must be contiguous and writable."""
        starts = np.array([0, *accumulate(lengths)], np.int32)
        if min(lengths, default=1) < 1 or starts[-1] != len(hidden):
            msg = f"lengths are {list(lengths)}; they must be at least 1 each, and {len(hidden)} together"
            raise ValueError(msg)
        if not hidden.flags.c_contiguous or not hidden.flags.writeable:
            msg = "hidden must be contiguous and writable"
            raise ValueError(msg)
        if len(hidden):
            self._forward(self.handle, starts.ctypes.data, len(lengths), hidden.ctypes.data)

    def take_times(self) -> dict[Phase, float]:
        """Seconds that the calling thread spent in each phase since the last call (GATE_UP: the MLP's up)."""
        seconds = (ctypes.c_double * len(Phase))()
        self.library.functions.ts_encoder_times(self.handle, seconds)
        return {phase: seconds[phase] for phase in Phase}

    def close(self) -> None:
        """Give back what it holds, the weights too. Once closed it stays closed."""
        super().close()
        self._close_weights()

    def _layer(self, layer: EncoderLayer) -> EncoderLayerStructure:
        attention_norm, attention_norm_bias = self._norm("attention_norm", layer.attention_norm)
        mlp_norm, mlp_norm_bias = self._norm("mlp_norm", layer.mlp_norm)
        return EncoderLayerStructure(
            qkv=self._matrix("query, key or value", layer.query, layer.key, layer.value),
            output=self._matrix("output", layer.output),
            up=self._matrix("up", layer.up),
            down=self._matrix("down", layer.down),
            attention_norm=attention_norm,
            attention_norm_bias=attention_norm_bias,
            mlp_norm=mlp_norm,
            mlp_norm_bias=mlp_norm_bias,
        )

    def _matrix(self, field: str, *parts: LinearWeights) -> int:
        self._matrices.append(packed(self._pool, self.shape.element, field, parts))
        return self._matrices[-1].handle

    def _norm(self, field: str, norm: NormWeights) -> tuple[int, int]:
        """Where its weights and biases are, as long as they are kept."""
        weight, bias = norm.arrays(field, self.shape.hidden_size)
        self._kept += [weight, bias]
        return weight.ctypes.data, bias.ctypes.data

    def _close_weights(self) -> None:
        for matrix in self._matrices:
            matrix.close()
        self._kept.clear()
