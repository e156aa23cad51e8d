"""What a step of texts gives, beyond what `test_pooling_architectures.py` compares with transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers_pooling_models import data_of, pooled, random_texts, resolve, runner_of, save_random, sequences
from trioserve.config import DenseModule, PoolerConfig
from trioserve.pooling_params import PoolingParams

if TYPE_CHECKING:
    from pathlib import Path

EMBED = PoolingParams(task="embed")
RAW = PoolingParams(task="embed", use_activation=False)
TOKENS = PoolingParams(task="token_embed", use_activation=False)
LENGTHS = (7, 1, 30, 2, 15)


def test_ways_of_pooling(tmp_path: Path) -> None:
    save_random(tmp_path, "BertModel", "Bert")
    texts = random_texts(LENGTHS)
    rows = pooled(runner_of(resolve(tmp_path)), texts, TOKENS)
    expected = {"cls": lambda x: x[0], "last": lambda x: x[-1], "mean": lambda x: x.astype(float).mean(0)}
    for kind, pool in expected.items():
        model = resolve(tmp_path, pooler=PoolerConfig(pooling_type=kind))
        for result, text in zip(pooled(runner_of(model), texts, RAW), rows, strict=True):
            np.testing.assert_allclose(result, pool(text), atol=1e-6)


def test_tasks_and_parameters_may_differ_within_a_step(tmp_path: Path) -> None:
    save_random(tmp_path, "BertModel", "Bert")
    runner = runner_of(resolve(tmp_path))
    text = random_texts([9])[0]
    cut = PoolingParams(task="embed", dimensions=5)
    batch = [sequences([text], params)[0] for params in (TOKENS, RAW, EMBED, cut)]
    rows, raw, unit, short = map(data_of, runner.pool(batch))
    assert rows.shape == (9, 32)
    assert (raw == rows[0]).all()
    np.testing.assert_allclose(np.linalg.norm(unit), 1, rtol=1e-6)
    np.testing.assert_allclose(unit * np.linalg.norm(raw), raw, rtol=1e-5)
    np.testing.assert_allclose(short, raw[:5] / np.linalg.norm(raw[:5]), rtol=1e-5)
    assert runner.pool([]) == []


def test_dense_modules_come_before_the_norm(tmp_path: Path) -> None:
    save_random(tmp_path, "BertModel", "Bert")
    layers = [torch.nn.Linear(32, 12), torch.nn.Linear(12, 6, bias=False)]
    for index, layer in enumerate(layers):
        (tmp_path / str(index)).mkdir()
        save_file(
            {f"linear.{name}": value for name, value in layer.state_dict().items()},
            tmp_path / str(index) / "model.safetensors",
        )
    modules = (
        DenseModule(folder="0", in_features=32, out_features=12, activation="gelu"),
        DenseModule(folder="1", in_features=12, out_features=6, bias=False, activation="tanh"),
    )
    import attrs

    model = resolve(tmp_path)
    assert model.pooler is not None
    raw = pooled(runner_of(model), texts := random_texts(LENGTHS), RAW)
    with_dense = attrs.evolve(model, pooler=attrs.evolve(model.pooler, dense=modules, hidden_size=6))
    results = pooled(runner_of(with_dense), texts, EMBED)
    with torch.inference_mode():
        for result, pooled_text in zip(results, raw, strict=True):
            inner = torch.nn.functional.gelu(layers[0](torch.from_numpy(pooled_text)))
            expected = torch.nn.functional.normalize(layers[1](inner).tanh(), dim=0)
            np.testing.assert_allclose(result, expected, atol=1e-5)


def test_values_that_are_not_finite_fail_their_own_text(tmp_path: Path) -> None:
    save_random(tmp_path, "BertModel", "Bert")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["embeddings.word_embeddings.weight"][50] = float("nan")
    save_file(tensors, path)
    runner = runner_of(resolve(tmp_path))
    good, bad, other = runner.pool(sequences([[5, 6, 7], [5, 50, 7], [8]], EMBED))
    assert bad.data is None
    assert bad.failure is not None
    assert "not finite" in bad.failure
    alone = pooled(runner, [[5, 6, 7], [8]], EMBED)
    np.testing.assert_allclose(data_of(good), alone[0], atol=1e-6)
    np.testing.assert_allclose(data_of(other), alone[1], atol=1e-6)


def test_weights_are_freed_and_read_again(tmp_path: Path) -> None:
    save_random(tmp_path, "BertModel", "Bert")
    runner, texts = runner_of(resolve(tmp_path)), random_texts(LENGTHS)
    before = pooled(runner, texts, EMBED)
    runner.free_weights()
    runner.load_weights()
    assert all((a == b).all() for a, b in zip(before, pooled(runner, texts, EMBED), strict=True))
    runner.close()
    runner.close()


@pytest.mark.parametrize("change", ["gamma", "prefix"])
def test_older_names_of_tensors(tmp_path: Path, change: str) -> None:
    save_random(tmp_path, "BertModel", "Bert")
    texts = random_texts(LENGTHS)
    expected = pooled(runner_of(resolve(tmp_path)), texts, EMBED)
    path = tmp_path / "model.safetensors"
    renamed = {"bert." * (change == "prefix") + name: tensor for name, tensor in load_file(path).items()}
    if change == "gamma":
        renamed = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): tensor
            for name, tensor in renamed.items()
        }
    save_file(renamed, path)
    results = pooled(runner_of(resolve(tmp_path)), texts, EMBED)
    assert all((a == b).all() for a, b in zip(expected, results, strict=True))
