"""The CPU engine's encoder against float64, and bit for bit whatever texts are beside, on every tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import torch

from trioserve_kernels.native import (
    Activation,
    Element,
    EncoderLayer,
    EncoderShape,
    Library,
    LinearWeights,
    NativeEmbedding,
    NativeEncoder,
    NativeLinear,
    NormWeights,
    ThreadPool,
    available_tiers,
    load,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

TOLERANCE = {Element.F32: 5e-5, Element.BF16: 0.1}
"""Absolute, of activations whose size is about 1; fp32's own error is 1e-6 to 1e-5."""

BERT = EncoderShape(hidden_size=96, num_heads=3, intermediate_size=160, norm_eps=1e-12)
WHISPER = EncoderShape(hidden_size=128, num_heads=2, intermediate_size=256, norm_eps=1e-5, pre_norm=True)
ODD = EncoderShape(
    hidden_size=60, num_heads=5, intermediate_size=70, norm_eps=1e-5, activation=Activation.GELU_TANH
)
SHAPES = {
    "bert": BERT,
    "whisper": WHISPER,
    "odd sizes": ODD,
    "relu, tiny heads": attrs.evolve(BERT, hidden_size=32, num_heads=4, activation=Activation.RELU),
    "bf16": attrs.evolve(BERT, element=Element.BF16),
}
LENGTHS = [1, 20, 33, 1, 64, 150]


@pytest.fixture(params=available_tiers())
def library(request: pytest.FixtureRequest) -> Library:
    return load(request.param)


@pytest.fixture
def pool(library: Library) -> Iterator[ThreadPool]:
    with ThreadPool(library, 2) as pool:
        yield pool


class Weights:
    """Random ones, of a size that keeps activations at about 1."""

    def __init__(self, shape: EncoderShape, layers: int = 2) -> None:
        self._random = np.random.default_rng(shape.hidden_size)
        self.shape = shape
        self.layers = [self._layer() for _ in range(layers)]
        self.final_norm = self._norm() if shape.pre_norm else None

    def encoder(self, pool: ThreadPool) -> NativeEncoder:
        return NativeEncoder(pool, self.shape, self.layers, self.final_norm)

    def hidden(self, rows: int) -> NDArray[np.float32]:
        return self._random.standard_normal((rows, self.shape.hidden_size), np.float32)

    def _layer(self) -> EncoderLayer:
        size, inner = self.shape.hidden_size, self.shape.intermediate_size
        return EncoderLayer(
            query=self._linear(size, size),
            key=LinearWeights(self._linear(size, size).weight),
            value=self._linear(size, size),
            output=self._linear(size, size),
            attention_norm=self._norm(),
            up=self._linear(inner, size),
            down=self._linear(size, inner),
            mlp_norm=self._norm(),
        )

    def _linear(self, rows: int, columns: int) -> LinearWeights:
        weight = self._random.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
        return LinearWeights(weight, self._random.standard_normal(rows, np.float32))

    def _norm(self) -> NormWeights:
        weight = 1 + self._random.standard_normal(self.shape.hidden_size, np.float32) / 4
        return NormWeights(weight, self._random.standard_normal(self.shape.hidden_size, np.float32))


def applied(weights: LinearWeights, x: Floats) -> Floats:
    products = x @ weights.weight.T.astype(np.float64)
    return products if weights.bias is None else products + weights.bias


def normed(weights: NormWeights, x: Floats, eps: float) -> Floats:
    off = x - x.mean(axis=1, keepdims=True)
    scaled = off / np.sqrt((off**2).mean(axis=1, keepdims=True) + eps) * weights.weight
    return scaled if weights.bias is None else scaled + weights.bias


def attended(shape: EncoderShape, layer: EncoderLayer, x: Floats, lengths: Sequence[int]) -> Floats:
    q, k, v = applied(layer.query, x), applied(layer.key, x), applied(layer.value, x)
    out, size, first = np.empty_like(x), shape.hidden_size // shape.num_heads, 0
    for length in lengths:
        for head in range(shape.num_heads):
            part = slice(first, first + length), slice(head * size, head * size + size)
            scores = q[part] @ k[part].T / size**0.5
            powers = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[part] = powers / powers.sum(axis=1, keepdims=True) @ v[part]
        first += length
    return applied(layer.output, out)


def activated(activation: Activation, x: Floats) -> Floats:
    wide = torch.from_numpy(x)
    if activation is Activation.RELU:
        return torch.relu(wide).numpy()
    approximate = "tanh" if activation is Activation.GELU_TANH else "none"
    return torch.nn.functional.gelu(wide, approximate=approximate).numpy()


def expected(weights: Weights, hidden: NDArray[np.float32], lengths: Sequence[int]) -> Floats:
    """What comes out of all layers, in float64."""
    shape, x = weights.shape, hidden.astype(np.float64)

    def mlp(layer: EncoderLayer, x: Floats) -> Floats:
        return applied(layer.down, activated(shape.activation, applied(layer.up, x)))

    for layer in weights.layers:
        if shape.pre_norm:
            x = x + attended(shape, layer, normed(layer.attention_norm, x, shape.norm_eps), lengths)
            x = x + mlp(layer, normed(layer.mlp_norm, x, shape.norm_eps))
        else:
            x = normed(layer.attention_norm, x + attended(shape, layer, x, lengths), shape.norm_eps)
            x = normed(layer.mlp_norm, x + mlp(layer, x), shape.norm_eps)
    return x if weights.final_norm is None else normed(weights.final_norm, x, shape.norm_eps)


# Against float64


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_all_layers_are_those_of_float64(pool: ThreadPool, shape: EncoderShape) -> None:
    weights = Weights(shape)
    hidden = weights.hidden(sum(LENGTHS))
    with weights.encoder(pool) as encoder:
        found = encoder.forward(hidden, LENGTHS)
    np.testing.assert_allclose(
        found, expected(weights, hidden, LENGTHS), atol=TOLERANCE[shape.element], rtol=0
    )


def test_a_step_of_more_rows_than_are_worked_on_at_a_time(pool: ThreadPool) -> None:
    weights = Weights(BERT, layers=1)
    lengths = [700, 3, 500]
    hidden = weights.hidden(sum(lengths))
    with weights.encoder(pool) as encoder:
        found = encoder.forward(hidden, lengths)
        for first, length in ((0, 700), (700, 3), (703, 500)):
            part = slice(first, first + length)
            np.testing.assert_array_equal(encoder.forward(hidden[part], [length]), found[part])
    np.testing.assert_allclose(found, expected(weights, hidden, lengths), atol=5e-5, rtol=0)


def test_large_scores_do_not_overflow(pool: ThreadPool) -> None:
    weights = Weights(BERT, layers=1)
    layer = weights.layers[0]
    loud = LinearWeights(layer.query.weight * 300, layer.query.bias)
    weights.layers[0] = attrs.evolve(layer, query=loud)
    hidden = weights.hidden(40)
    with weights.encoder(pool) as encoder:
        found = encoder.forward(hidden, [40])
    np.testing.assert_allclose(found, expected(weights, hidden, [40]), atol=3e-3, rtol=0)


# Bit for bit


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bits_do_not_depend_on_the_texts_beside(pool: ThreadPool, shape: EncoderShape) -> None:
    weights = Weights(shape)
    hidden = weights.hidden(sum(LENGTHS))
    with weights.encoder(pool) as encoder:
        together = encoder.forward(hidden, LENGTHS)
        first = 0
        for length in LENGTHS:
            alone = encoder.forward(hidden[first : first + length], [length])
            np.testing.assert_array_equal(alone, together[first : first + length])
            first += length


def test_bits_do_not_depend_on_the_number_of_threads(library: Library) -> None:
    weights = Weights(WHISPER)
    hidden = weights.hidden(sum(LENGTHS))
    found = []
    for threads in (1, 2, 5):
        with ThreadPool(library, threads) as pool, weights.encoder(pool) as encoder:
            found.append(encoder.forward(hidden, LENGTHS))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


def test_a_text_that_is_not_a_number_leaves_the_others_alone(pool: ThreadPool) -> None:
    weights = Weights(BERT)
    hidden = weights.hidden(70)
    with weights.encoder(pool) as encoder:
        before = encoder.forward(hidden, [20, 30, 20])
        hidden[25] = np.nan
        after = encoder.forward(hidden, [20, 30, 20])
        again = encoder.forward(hidden[:20], [20])
    assert np.isnan(after[20:50]).all()
    np.testing.assert_array_equal(np.delete(after, slice(20, 50), 0), np.delete(before, slice(20, 50), 0))
    np.testing.assert_array_equal(again, before[:20])


# Linear maps and embeddings


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (51, 384), (384, 240), (17, 33)])
def test_linear_maps_are_those_of_float64(pool: ThreadPool, rows: int, columns: int) -> None:
    random = np.random.default_rng(rows)
    weight, bias = (
        random.standard_normal((rows, columns), np.float32),
        random.standard_normal(rows, np.float32),
    )
    for x in (random.standard_normal((count, columns), np.float32) for count in (0, 1, 100)):
        for linear in (LinearWeights(weight), LinearWeights(weight, bias)):
            with NativeLinear(pool, linear) as native:
                found = native(x)
            size = np.abs(x.astype(np.float64)) @ np.abs(weight.T) + 1
            assert (np.abs(found - applied(linear, x.astype(np.float64))) <= 1.2e-5 * size).all()


def test_embeddings_are_summed_and_normed(pool: ThreadPool) -> None:
    random = np.random.default_rng(0)
    tables = [random.standard_normal((rows, 50), np.float32) for rows in (1000, 64, 2)]
    norm = NormWeights(random.standard_normal(50, np.float32), random.standard_normal(50, np.float32))
    ids = [random.integers(0, len(table), 37).astype(np.int32) for table in tables]
    total = sum(table[rows].astype(np.float64) for table, rows in zip(tables, ids, strict=True))
    plain = NativeEmbedding(pool, tables)(*ids)
    np.testing.assert_allclose(plain, total, atol=1e-6, rtol=0)
    with_norm = NativeEmbedding(pool, tables, norm, 1e-12)(*ids)
    np.testing.assert_allclose(with_norm, normed(norm, total, 1e-12), atol=1e-5, rtol=0)


# Wrong arguments


def _layer_with(**changes: Any) -> EncoderLayer:
    return attrs.evolve(Weights(BERT, layers=1).layers[0], **changes)


@pytest.mark.parametrize(
    ("shape", "layers", "message"),
    [
        (attrs.evolve(BERT, num_heads=5), [_layer_with()], "multiple of num_heads, 5"),
        (attrs.evolve(BERT, activation=Activation.SILU), [_layer_with()], "activation is SILU"),
        (BERT, [], "num_layers is 0"),
        (
            BERT,
            [_layer_with(up=LinearWeights(np.zeros((160, 95), np.float32)))],
            r"up's weight is float32 \[160, 95\]; it must be float32 \[160, 96\]",
        ),
        (
            BERT,
            [_layer_with(key=LinearWeights(np.zeros((96, 96), np.float32), np.zeros(95, np.float32)))],
            r"bias is float32 \[95\]; it must be float32 \[96\]",
        ),
        (
            BERT,
            [_layer_with(mlp_norm=NormWeights(np.zeros(96)))],  # type: ignore[arg-type]
            r"mlp_norm's weight is float64 \[96\]; it must be float32 \[96\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    pool: ThreadPool, shape: EncoderShape, layers: list[EncoderLayer], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        NativeEncoder(pool, shape, layers)


def test_texts_that_do_not_fit_are_refused(pool: ThreadPool) -> None:
    with Weights(BERT, layers=1).encoder(pool) as encoder:
        hidden = np.zeros((10, 96), np.float32)
        assert encoder.forward(hidden[:0], []).shape == (0, 96)
        for lengths in ([9], [5, 6], [10, 0], [-1, 11], []):
            with pytest.raises(ValueError, match="10 together"):
                encoder.forward(hidden, lengths)
        with pytest.raises(ValueError, match=r"float32 \[10, 95\]; it must be float32 \[tokens, 96\]"):
            encoder.forward(np.zeros((10, 95), np.float32), [10])


def test_rows_that_a_table_has_not_are_refused(pool: ThreadPool) -> None:
    embedding = NativeEmbedding(pool, [np.zeros((10, 4), np.float32)])
    for wrong in (-1, 10):
        with pytest.raises(ValueError, match=rf"ids\[0\] has {wrong}; it must be between 0 and 9"):
            embedding(np.array([0, wrong], np.int32))
    with pytest.raises(ValueError, match="int64"):
        embedding(np.array([0]))  # type: ignore[arg-type]
