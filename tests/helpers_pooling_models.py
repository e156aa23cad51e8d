"""Tiny random models that pool, as transformers saves them, and our runner for them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from helpers_model_sources import model_config
from trioserve.args import EngineArgs
from trioserve.model_sources import SilentProgress, resolve_model
from trioserve.worker.pooling_batch import PoolingSequence
from trioserve.worker.pooling_runner import PoolingRunner

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from trioserve.config import ResolvedModel
    from trioserve.pooling_params import PoolingParams
    from trioserve.worker.pooling_batch import PooledSequence

VOCAB = 100

_BERT_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
}
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertConfig", _BERT_LIKE),
    "Roberta": ("RobertaConfig", _BERT_LIKE | {"type_vocab_size": 1}),
    "XLMRoberta": ("XLMRobertaConfig", _BERT_LIKE | {"type_vocab_size": 1, "hidden_act": "gelu_new"}),
    "DistilBert": (
        "DistilBertConfig",
        {
            "vocab_size": VOCAB,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 40,
            "max_position_embeddings": 64,
        },
    ),
    "Electra": ("ElectraConfig", _BERT_LIKE | {"embedding_size": 16}),
    "ModernBert": (
        "ModernBertConfig",
        _BERT_LIKE
        | {
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 2,
            "sep_token_id": 3,
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
    ),
    "Llama": ("LlamaConfig", _DECODER),
    "Mistral": ("MistralConfig", _DECODER | {"sliding_window": 6}),
    "Qwen2": ("Qwen2Config", _DECODER),
    "Qwen3": ("Qwen3Config", _DECODER),
    "Gemma3Text": ("Gemma3TextConfig", _DECODER | {"use_bidirectional_attention": True, "sliding_window": 8}),
}


def save_random(directory: Path, architecture: str, family: str, **changes: Any) -> Any:
    """A random model by transformers, in float32, saved there; returns it, ready to be asked."""
    import torch
    import transformers

    kind, values = _CONFIGS[family]
    torch.manual_seed(len(architecture))
    config = getattr(transformers, kind)(**(values | changes))
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # transformers' own are so small that mistakes would not show
            parameter.normal_(0, 0.15) if parameter.ndim > 1 else parameter.add_(
                0.1 * torch.randn_like(parameter)
            )
    transformers.utils.logging.disable_progress_bar()  # it starts a thread, which would stay
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return model


def resolve(directory: Path, **changes: Any) -> ResolvedModel:
    return resolve_model(model_config(directory, **changes), SilentProgress())


def open_runner(model: ResolvedModel, **changes: Any) -> AbstractContextManager[PoolingRunner]:
    config = EngineArgs(model=model.directory, threads=2, **changes).create_engine_config()
    return contextlib.closing(PoolingRunner(model, config))


def random_texts(lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(5, VOCAB, length).tolist() for length in lengths]


def sequences(texts: Sequence[Sequence[int]], params: PoolingParams, **more: Any) -> list[PoolingSequence]:
    return [
        PoolingSequence(request_id=index, token_ids=text, params=params, **more)
        for index, text in enumerate(texts)
    ]


def pooled(
    model: ResolvedModel, texts: Sequence[Sequence[int]], params: PoolingParams, **changes: Any
) -> list[np.ndarray]:
    """By a runner of its own, in one step."""
    with open_runner(model, **changes) as runner:
        return [data_of(result) for result in runner.pool(sequences(texts, params))]


def data_of(result: PooledSequence) -> np.ndarray:
    assert result.data is not None, result.failure
    assert result.data.dtype == np.float32
    return result.data
