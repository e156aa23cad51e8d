"""What a model's files say about pooling, and what the user wants over that."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from helpers_model_sources import model_config
from trioserve.config import DenseModule, PoolerConfig
from trioserve.errors import InvalidConfigError, ModelNotSupportedError, ModelSourceError
from trioserve.model_sources import SilentProgress, resolve_model

if TYPE_CHECKING:
    from pathlib import Path

    from trioserve.config import ResolvedModel

BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 300,
    "hidden_size": 48,
    "max_position_embeddings": 128,
}
LLAMA = BERT | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
CLASSIFIER = BERT | {"architectures": ["BertForSequenceClassification"]}
TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 3, "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def write(directory: Path, files: dict[str, Any]) -> Path:
    """files: name -> what is written as JSON."""
    for name, content in ({"tokenizer.json": {}} | files).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content))
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def resolve(directory: Path, config: dict[str, Any], /, files: Any = None, **changes: Any) -> ResolvedModel:
    write(directory, {"config.json": config} | (files or {}))
    return resolve_model(model_config(directory, **changes), SilentProgress())


def pooler_of(*args: Any, **kwargs: Any) -> Any:
    return resolve(*args, **kwargs).pooler


# What the architecture says


@pytest.mark.parametrize(
    ("change", "tasks", "pooling_type"),
    [
        ({}, ("embed", "token_embed", "score"), "cls"),
        ({"architectures": ["BertForMaskedLM"]}, ("embed", "token_embed", "score"), "cls"),
        (
            {"architectures": ["Qwen3Model"], "model_type": "qwen3"},
            ("embed", "token_embed", "score"),
            "last",
        ),
        ({"architectures": ["BertForTokenClassification"]}, ("token_classify",), "all"),
        ({"architectures": ["BertForSequenceClassification"]}, ("classify",), "cls"),
        (
            {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "fits"}},
            ("classify", "score"),
            "cls",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama", "num_labels": 1},
            ("classify", "score"),
            "last",
        ),
        (
            {
                "architectures": ["ModernBertForSequenceClassification"],
                "model_type": "modernbert",
                "classifier_pooling": "mean",
            },
            ("classify",),
            "mean",
        ),
    ],
)
def test_tasks(tmp_path: Path, change: dict[str, Any], tasks: Any, pooling_type: str) -> None:
    model = resolve(tmp_path, BERT | change)
    assert model.runner == "pooling"
    assert model.tasks == tasks
    assert model.dtype == "float32"
    assert model.pooler is not None
    assert model.pooler.pooling_type == pooling_type


def test_labels_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = {str(index): f"label {index}" for index in (10, 2, 1, 0, 3, 4, 5, 6, 7, 8, 9)}
    pooler = pooler_of(tmp_path, CLASSIFIER | {"id2label": names})
    assert pooler.labels == tuple(f"label {index}" for index in range(11))
    assert pooler_of(tmp_path, CLASSIFIER).labels == ("LABEL_0", "LABEL_1")


@pytest.mark.parametrize(
    ("change", "activation"),
    [
        ({}, "softmax"),
        ({"num_labels": 1}, "sigmoid"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "identity"),
        (
            {
                "num_labels": 1,
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            "identity",
        ),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
    ],
)
def test_activations_of_classes(tmp_path: Path, change: dict[str, Any], activation: str) -> None:
    pooler = pooler_of(tmp_path, CLASSIFIER | change)
    assert (pooler.activation, pooler.activates) == (activation, True)
    off = pooler_of(tmp_path, CLASSIFIER | change, pooler=PoolerConfig(use_activation=False))
    assert (off.activation, off.activates) == (activation, False)


def test_positions_of_roberta_begin_behind_the_padding(tmp_path: Path) -> None:
    roberta = BERT | {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "max_position_embeddings": 514,
        "pad_token_id": 1,
    }
    assert resolve(tmp_path, roberta).max_model_len == 512


# What the user wants


def test_a_model_that_generates_may_embed(tmp_path: Path) -> None:
    assert resolve(tmp_path, LLAMA).tasks == ("generate",)
    for wanted in ({"runner": "pooling"}, {"convert": "embed"}, {"runner": "pooling", "convert": "embed"}):
        model = resolve(tmp_path, LLAMA, **wanted)
        assert model.tasks == ("embed", "token_embed", "score")
        assert model.pooler is not None
        assert model.pooler.pooling_type == "last"


def test_what_generates_need_not_be_ours_to_embed(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["MistralForCausalLM"], "rope_scaling": {"type": "yarn"}}
    assert resolve(tmp_path, config, convert="embed").runner == "pooling"
    with pytest.raises(ModelNotSupportedError, match=r"MistralForCausalLM.*Llama.*runner=pooling"):
        resolve(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "changes", "field"),
    [
        (BERT, {"runner": "generate"}, "runner"),
        (LLAMA, {"runner": "generate", "convert": "embed"}, "convert"),
        (BERT, {"convert": "classify"}, "convert"),
        (LLAMA, {"runner": "pooling", "convert": "classify"}, "convert"),
        (BERT, {"quantization": "int8"}, "quantization"),
        (CLASSIFIER, {"pooler": PoolerConfig(pooling_type="mean")}, "pooler_config"),
        (BERT, {"pooler": PoolerConfig(dimensions=(16, 49))}, "pooler_config"),
        (BERT, {"max_model_len": 129}, "max_model_len"),
    ],
)
def test_what_it_cannot_be(tmp_path: Path, config: Any, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfigError, match="must be") as caught:
        resolve(tmp_path, config, **changes)
    assert caught.value.field == field


def test_convert_none_leaves_a_model_that_generates_without_results(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupportedError, match="convert must be auto or embed, got 'none'"):
        resolve(tmp_path, LLAMA, runner="pooling", convert="none")


@pytest.mark.parametrize(
    "change", [{"quantization_config": {"quant_method": "awq"}}, {"gguf_types": {"Q4_K": 3}}]
)
def test_quantized_weights_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ModelNotSupportedError, match="quantized weights"):
        resolve(tmp_path, BERT | change)


def test_the_users_pooling_and_sizes_come_first(tmp_path: Path) -> None:
    pooler = pooler_of(
        tmp_path,
        BERT | {"matryoshka_dimensions": [8, 16]},
        pooler=PoolerConfig(pooling_type="mean", use_activation=False, dimensions=(24,)),
    )
    assert (pooler.pooling_type, pooler.normalizes, pooler.dimensions) == ("mean", False, (24,))


# sentence-transformers' files


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (None, "mean"),
        ({"word_embedding_dimension": 48, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"embedding_dimension": 48, "pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_pooling(tmp_path: Path, pooling: Any, expected: str) -> None:
    files = {"modules.json": [TRANSFORMER, POOLING, NORMALIZE]}
    if pooling is not None:
        files["1_Pooling/config.json"] = pooling
    pooler = pooler_of(tmp_path, LLAMA, files)  # files of sentence-transformers make a decoder an embedder
    assert (pooler.pooling_type, pooler.normalizes) == (expected, True)


def test_no_normalize_module_and_newer_class_names(tmp_path: Path) -> None:
    modules = [
        TRANSFORMER,
        POOLING | {"type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling"},
    ]
    assert pooler_of(tmp_path, BERT, {"modules.json": modules}).normalizes is False
    on = PoolerConfig(use_activation=True)
    assert pooler_of(tmp_path, BERT, {"modules.json": modules}, pooler=on).normalizes is True


@pytest.mark.parametrize(
    ("pooling", "words"),
    [
        ({"pooling_mode": "max"}, "max pooling. Supported is one of mean, cls, lasttoken"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls and mean pooling"),
        ({"pooling_mode": "mean", "include_prompt": False}, "leaves the prompt out"),
    ],
)
def test_poolings_that_are_refused(tmp_path: Path, pooling: dict[str, Any], words: str) -> None:
    files = {"modules.json": [TRANSFORMER, POOLING], "1_Pooling/config.json": pooling}
    with pytest.raises(ModelNotSupportedError, match=words):
        resolve(tmp_path, BERT, files)


@pytest.mark.parametrize(
    "modules",
    [
        [TRANSFORMER, POOLING, {"idx": 2, "path": "2_CNN", "type": "sentence_transformers.models.CNN"}],
        [TRANSFORMER, DENSE, POOLING],
        [POOLING],
        [TRANSFORMER, POOLING, NORMALIZE, POOLING],
    ],
)
def test_pipelines_that_are_refused(tmp_path: Path, modules: list[Any]) -> None:
    with pytest.raises(ModelNotSupportedError, match="Supported are Transformer, Pooling"):
        resolve(tmp_path, BERT, {"modules.json": modules})


def test_dense(tmp_path: Path) -> None:
    dense = {
        "in_features": 48,
        "out_features": 16,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    files = {"modules.json": [TRANSFORMER, POOLING, DENSE], "2_Dense/config.json": dense}
    with pytest.raises(ModelSourceError, match=r"no .*2_Dense/model\.safetensors"):
        resolve(tmp_path, BERT, files)
    (tmp_path / "2_Dense/model.safetensors").write_bytes(b"")
    pooler = pooler_of(tmp_path, BERT, files)
    module = DenseModule(folder="2_Dense", in_features=48, out_features=16, bias=False, activation="identity")
    assert (pooler.hidden_size, pooler.dense) == (16, (module,))
    with pytest.raises(ModelNotSupportedError, match="in_features must be 48, got 47"):
        resolve(tmp_path, BERT, files | {"2_Dense/config.json": dense | {"in_features": 47}})
    with pytest.raises(ModelNotSupportedError, match=r"nn\.Mish.*Supported"):
        resolve(tmp_path, BERT, files | {"2_Dense/config.json": dense | {"activation_function": "nn.Mish"}})


def test_no_pooling_means_a_result_per_token(tmp_path: Path) -> None:
    dense = {"in_features": 48, "out_features": 16, "activation_function": "torch.nn.Identity"}
    write(tmp_path, {"1_Dense/config.json": dense})
    (tmp_path / "1_Dense/model.safetensors").write_bytes(b"")
    model = resolve(tmp_path, BERT, {"modules.json": [TRANSFORMER, DENSE | {"path": "1_Dense"}]})
    assert model.tasks == ("token_embed", "score")


def test_lengths_case_and_prompts(tmp_path: Path) -> None:
    files = {
        "sentence_bert_config.json": {"max_seq_length": 100, "do_lower_case": True},
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "5.0.0"},
            "prompts": {"query": "query: ", "document": ""},
            "default_prompt_name": "query",
        },
    }
    model = resolve(tmp_path, BERT, files)
    assert (model.max_model_len, model.context_length) == (100, 128)
    assert model.pooler is not None
    assert model.pooler.lower_case is True
    assert model.pooler.prompts == {"query": "query: ", "document": ""}
    assert model.pooler.default_prompt == "query"
    assert (
        resolve(tmp_path, BERT, files, max_model_len=128).max_model_len == 128
    )  # no more than the positions
    files["config_sentence_transformers.json"]["default_prompt_name"] = "passage"
    with pytest.raises(ModelSourceError, match="must be one of query, document, got 'passage'"):
        resolve(tmp_path, BERT, files)


def test_how_embeddings_are_compared(tmp_path: Path) -> None:
    assert pooler_of(tmp_path, BERT).similarity == "cosine"
    files = {"config_sentence_transformers.json": {"similarity_fn_name": "dot"}}
    model = resolve(tmp_path, BERT, files)
    assert model.pooler is not None
    assert model.pooler.similarity == "dot"
    files["config_sentence_transformers.json"]["similarity_fn_name"] = "jaccard"
    with pytest.raises(ModelNotSupportedError, match="must be one of cosine, dot, euclidean, manhattan"):
        resolve(tmp_path, BERT, files)


@pytest.mark.parametrize(
    ("change", "dimensions"),
    [({}, None), ({"is_matryoshka": True}, ()), ({"matryoshka_dimensions": [8, 16, 48]}, (8, 16, 48))],
)
def test_matryoshka(tmp_path: Path, change: dict[str, Any], dimensions: Any) -> None:
    assert pooler_of(tmp_path, BERT | change).dimensions == dimensions


def test_a_file_that_makes_no_sense_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"modules\.json: \[1\]\.type is required"):
        resolve(tmp_path, BERT, {"modules.json": [TRANSFORMER, {"idx": 1}]})
    with pytest.raises(ModelSourceError, match=r"modules\.json must hold a JSON list"):
        resolve(tmp_path, BERT, {"modules.json": {}})
