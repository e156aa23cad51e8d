"""Each architecture against transformers, which computes one text at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from helpers_pooling_models import data_of, open_runner, pooled, random_texts, resolve, save_random
from trioserve.errors import ModelNotSupportedError
from trioserve.pooling_params import PoolingParams
from trioserve.worker.pooling_batch import PoolingSequence

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = (7, 1, 30, 2, 15)


def hidden_states(model: Any, text: list[int]) -> np.ndarray:
    with torch.inference_mode():
        states: np.ndarray = model(torch.tensor([text])).last_hidden_state[0].numpy()
    return states


def unit(x: np.ndarray) -> np.ndarray:
    normed: np.ndarray = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return normed


@pytest.mark.parametrize("family", ["Bert", "Roberta", "XLMRoberta", "DistilBert", "Electra", "ModernBert"])
def test_encoders(tmp_path: Path, family: str) -> None:
    reference = save_random(tmp_path, f"{family}Model", family)
    model = resolve(tmp_path)
    assert (model.runner, model.tasks) == ("pooling", ("embed", "token_embed", "score"))
    assert model.max_model_len in {64, 66}
    texts = random_texts(LENGTHS)
    expected = [hidden_states(reference, text) for text in texts]
    for text, result in zip(expected, pooled(model, texts, PoolingParams(task="embed")), strict=True):
        np.testing.assert_allclose(result, unit(text[0]), atol=1e-5)
    raw = PoolingParams(task="token_embed", use_activation=False)
    for text, result in zip(expected, pooled(model, texts, raw), strict=True):
        np.testing.assert_allclose(result, text, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3Text"])
def test_decoders(tmp_path: Path, family: str) -> None:
    reference = save_random(tmp_path, f"{family}Model", family)
    model = resolve(tmp_path)
    texts = random_texts(LENGTHS)
    for text, result in zip(texts, pooled(model, texts, PoolingParams(task="embed")), strict=True):
        np.testing.assert_allclose(result, unit(hidden_states(reference, text)[-1]), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "num_labels"),
    [
        ("Bert", 1),
        ("Roberta", 3),
        ("XLMRoberta", 1),
        ("DistilBert", 3),
        ("Electra", 2),
        ("ModernBert", 3),
        ("Qwen3", 1),
        ("Llama", 3),
    ],
)
def test_sequence_classifiers(tmp_path: Path, family: str, num_labels: int) -> None:
    architecture = f"{family}ForSequenceClassification"
    reference = save_random(tmp_path, architecture, family, num_labels=num_labels)
    model = resolve(tmp_path)
    assert model.tasks == (("classify", "score") if num_labels == 1 else ("classify",))
    texts = random_texts(LENGTHS)
    with torch.inference_mode():
        logits = [reference(torch.tensor([text])).logits[0] for text in texts]
    raw = pooled(model, texts, PoolingParams(task="classify", use_activation=False))
    active = pooled(model, texts, PoolingParams(task="classify"))
    for expected, values, probabilities in zip(logits, raw, active, strict=True):
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)
        activated = expected.sigmoid() if num_labels == 1 else expected.softmax(-1)
        np.testing.assert_allclose(probabilities, activated, atol=1e-4)


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "ModernBert", "Qwen2"])
def test_token_classifiers(tmp_path: Path, family: str) -> None:
    reference = save_random(tmp_path, f"{family}ForTokenClassification", family, num_labels=4)
    model = resolve(tmp_path)
    assert model.tasks == ("token_classify",)
    texts = random_texts(LENGTHS)
    results = pooled(model, texts, PoolingParams(task="token_classify"))
    for text, result in zip(texts, results, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([text])).logits[0]
        np.testing.assert_allclose(result, logits.softmax(-1), atol=1e-4)


def test_pairs_have_token_types(tmp_path: Path) -> None:
    reference = save_random(tmp_path, "BertForSequenceClassification", "Bert", num_labels=1)
    text, types = random_texts([9])[0], [0] * 4 + [1] * 5
    model = resolve(tmp_path)
    pair = PoolingSequence(
        request_id=0, token_ids=text, token_type_ids=types, params=PoolingParams(task="classify")
    )
    with torch.inference_mode():
        logits = reference(torch.tensor([text]), token_type_ids=torch.tensor([types])).logits[0]
    other = PoolingSequence(request_id=1, token_ids=text, params=PoolingParams(task="classify"))
    with open_runner(model) as runner:
        beside_one_without = runner.pool([other, pair])
    np.testing.assert_allclose(data_of(beside_one_without[1]), logits.sigmoid(), atol=1e-5)
    assert abs(data_of(beside_one_without[0]) - data_of(beside_one_without[1])) > 1e-3


def test_a_model_for_training_is_an_encoder_with_a_head(tmp_path: Path) -> None:
    """Many sentence-transformers models on the hub are saved so."""
    reference = save_random(tmp_path, "RobertaForMaskedLM", "Roberta").roberta
    text = random_texts([12])
    result = pooled(resolve(tmp_path), text, PoolingParams(task="embed"))[0]
    np.testing.assert_allclose(result, unit(hidden_states(reference, text[0])[0]), atol=1e-5)


def test_a_generating_model_may_be_made_to_embed(tmp_path: Path) -> None:
    reference = save_random(tmp_path, "Qwen2ForCausalLM", "Qwen2").model
    text = random_texts([12])
    model = resolve(tmp_path, convert="embed")
    assert resolve(tmp_path).tasks == ("generate",)
    assert resolve(tmp_path, runner="pooling") == model
    result = pooled(model, text, PoolingParams(task="embed"))[0]
    np.testing.assert_allclose(result, unit(hidden_states(reference, text[0])[-1]), atol=1e-5)


def test_an_architecture_that_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.MPNetConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=50
    )
    transformers.utils.logging.disable_progress_bar()
    transformers.MPNetModel(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelNotSupportedError, match=r"MPNetModel cannot .* an attention of its own"):
        open_runner(resolve(tmp_path))


def test_an_architecture_that_nobody_has_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, "BertModel", "Bert")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("BertModel", "ParrotModel"))
    with pytest.raises(ModelNotSupportedError, match="no ParrotModel"):
        open_runner(resolve(tmp_path))
