"""What a step of texts gives, beyond what `test_pooling_architectures.py` compares with transformers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers_model_sources import packaged_model
from helpers_pooling_models import data_of, open_runner, pooled, random_texts, resolve, save_random, sequences
from trioserve.config import DenseModule, PoolerConfig
from trioserve.errors import InvalidConfigError
from trioserve.pooling_params import PoolingParams
from trioserve_kernels.native import available_tiers

EMBED = PoolingParams(task="embed")
RAW = PoolingParams(task="embed", use_activation=False)
TOKENS = PoolingParams(task="token_embed", use_activation=False)
LENGTHS = (7, 1, 30, 2, 15)


def test_ways_of_pooling(tmp_path: Path) -> None:
    save_random(tmp_path, "BertModel", "Bert")
    texts = random_texts(LENGTHS)
    rows = pooled(resolve(tmp_path), texts, TOKENS)
    expected = {"cls": lambda x: x[0], "last": lambda x: x[-1], "mean": lambda x: x.astype(float).mean(0)}
    for kind, pool in expected.items():
        model = resolve(tmp_path, pooler=PoolerConfig(pooling_type=kind))
        for result, text in zip(pooled(model, texts, RAW), rows, strict=True):
            np.testing.assert_allclose(result, pool(text), atol=1e-6)


def test_tasks_and_parameters_may_differ_within_a_step(tmp_path: Path) -> None:
    save_random(tmp_path, "BertModel", "Bert")
    text = random_texts([9])[0]
    cut = PoolingParams(task="embed", dimensions=5)
    batch = [sequences([text], params)[0] for params in (TOKENS, RAW, EMBED, cut)]
    with open_runner(resolve(tmp_path)) as runner:
        rows, raw, unit, short = map(data_of, runner.pool(batch))
        assert runner.pool([]) == []
    assert rows.shape == (9, 32)
    assert (raw == rows[0]).all()
    np.testing.assert_allclose(np.linalg.norm(unit), 1, rtol=1e-6)
    np.testing.assert_allclose(unit * np.linalg.norm(raw), raw, rtol=1e-5)
    np.testing.assert_allclose(short, raw[:5] / np.linalg.norm(raw[:5]), rtol=1e-5)


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
    model = resolve(tmp_path)
    assert model.pooler is not None
    raw = pooled(model, texts := random_texts(LENGTHS), RAW)
    with_dense = attrs.evolve(model, pooler=attrs.evolve(model.pooler, dense=modules, hidden_size=6))
    results = pooled(with_dense, texts, EMBED)
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
    model = resolve(tmp_path)
    with open_runner(model) as runner:
        good, bad, other = runner.pool(sequences([[5, 6, 7], [5, 50, 7], [8]], EMBED))
    assert bad.data is None
    assert bad.failure is not None
    assert "not finite" in bad.failure
    alone = pooled(model, [[5, 6, 7], [8]], EMBED)
    np.testing.assert_allclose(data_of(good), alone[0], atol=1e-6)
    np.testing.assert_allclose(data_of(other), alone[1], atol=1e-6)


def test_weights_are_freed_and_read_again(tmp_path: Path) -> None:
    save_random(tmp_path, "BertModel", "Bert")
    batch = sequences(random_texts(LENGTHS), EMBED)
    with open_runner(resolve(tmp_path)) as runner:
        before = runner.pool(batch)
        runner.free_weights()
        runner.load_weights()
        after = runner.pool(batch)
        runner.close()  # once more is fine
    assert all((data_of(a) == data_of(b)).all() for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("change", ["gamma", "prefix"])
def test_older_names_of_tensors(tmp_path: Path, change: str) -> None:
    save_random(tmp_path, "BertModel", "Bert")
    texts = random_texts(LENGTHS)
    expected = pooled(resolve(tmp_path), texts, EMBED)
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
    results = pooled(resolve(tmp_path), texts, EMBED)
    assert all((a == b).all() for a, b in zip(expected, results, strict=True))


# The kernels


@pytest.mark.parametrize("kernels", ["torch", *available_tiers()])
def test_kernels_agree_with_transformers(tmp_path: Path, kernels: str) -> None:
    reference = save_random(tmp_path, "BertModel", "Bert")
    texts = random_texts(LENGTHS)
    with open_runner(resolve(tmp_path), cpu_kernels=kernels) as runner:
        assert kernels in runner.kernels
        results = [data_of(result) for result in runner.pool(sequences(texts, TOKENS))]
    for text, result in zip(texts, results, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([text])).last_hidden_state[0]
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=3e-5)


@pytest.mark.skipif(not available_tiers(), reason="there are no native kernels")
def test_a_result_does_not_depend_on_what_is_beside_it() -> None:
    model = packaged_model("minilm-l6")
    texts = random_texts([20, 3, 130, 1, 64])
    with open_runner(model) as runner:
        together = runner.pool(sequences(texts, EMBED))
        for text, beside in zip(texts, together, strict=True):
            (alone,) = runner.pool(sequences([text], EMBED))
            assert (data_of(alone) == data_of(beside)).all()


def test_minilm_is_what_transformers_and_the_mean_make_of_it() -> None:
    import transformers

    model = packaged_model("minilm-l6")
    transformers.utils.logging.disable_progress_bar()
    reference = transformers.AutoModel.from_pretrained(model.directory).eval()
    texts = random_texts([1, 2, 17, 100, 256, 512])
    for text, result in zip(texts, pooled(model, texts, EMBED), strict=True):
        with torch.inference_mode():
            mean = reference(torch.tensor([text])).last_hidden_state[0].mean(0)
        expected = torch.nn.functional.normalize(mean, dim=0)
        np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.skipif(not available_tiers(), reason="there are no native kernels")
def test_the_native_kernels_need_no_torch(tmp_path: Path) -> None:
    save_random(tmp_path, "BertModel", "Bert")
    code = f"""
        import sys
        from pathlib import Path
        from helpers_pooling_models import open_runner, resolve, sequences
        from trioserve.pooling_params import PoolingParams

        with open_runner(resolve(Path({str(tmp_path)!r}))) as runner:
            runner.pool(sequences([[5, 6]], PoolingParams(task="embed")))
        assert not sys.modules.keys() & {{"torch", "transformers"}}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=Path(__file__).parent)


def test_kernels_that_cannot_compute_a_model_are_refused(tmp_path: Path) -> None:
    save_random(tmp_path, "Qwen2Model", "Qwen2")
    with pytest.raises(InvalidConfigError, match="scalar: the native kernels do not compute Qwen2Model"):
        open_runner(resolve(tmp_path), cpu_kernels="scalar")
