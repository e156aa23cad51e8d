"""The shape of a BERT, as the encoders need to know it, from config.json. Imports no torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import attrs

from trioserve.models.bert_names import BERT_NAMES, DISTILBERT_NAMES, BertNames
from trioserve.models.config_json import read_config, size

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BertActivation", "BertConfig", "bert_config", "family_of"]

BertActivation = Literal["gelu", "gelu_tanh", "relu"]
"""gelu: exact; gelu_tanh: with the tanh approximation."""

_ACTIVATIONS: dict[str, BertActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

_NAMES = {
    "Bert": BERT_NAMES,
    "Roberta": attrs.evolve(BERT_NAMES, base="roberta."),
    "XLMRoberta": attrs.evolve(BERT_NAMES, base="roberta."),
    "Camembert": attrs.evolve(BERT_NAMES, base="roberta."),
    "DistilBert": DISTILBERT_NAMES,
}
"""Families that differ from BERT in names and positions only."""

_SUFFIX = re.compile(r"(Model|ForMaskedLM|ForSequenceClassification|ForTokenClassification|ForCausalLM)$")


@attrs.frozen(kw_only=True)
class BertConfig:
    """An encoder with learned positions, whose layers norm what they add up (post-norm)."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    norm_eps: float
    activation: BertActivation
    num_positions: int
    """Rows of the table of positions."""
    first_position: int
    """Row of a text's first token."""
    num_types: int
    """Rows of the table of token types; 0: there is none."""
    names: BertNames

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@attrs.frozen(kw_only=True)
class _BertJson:
    """The keys that we read; the defaults are transformers'."""

    vocab_size: int = size()
    hidden_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    intermediate_size: int = size()
    max_position_embeddings: int = size()
    type_vocab_size: int = size(2)
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    pad_token_id: int | None = None
    position_embedding_type: str | None = "absolute"
    is_decoder: bool = False


@attrs.frozen(kw_only=True)
class _DistilBertJson:
    vocab_size: int = size()
    dim: int = size()
    n_layers: int = size()
    n_heads: int = size()
    hidden_dim: int = size()
    max_position_embeddings: int = size()
    activation: str = "gelu"


def family_of(architecture: str) -> str:
    """The architecture's name without what says what it is for: XLMRoberta of XLMRobertaModel."""
    return _SUFFIX.sub("", architecture)


def bert_config(architecture: str, raw: Mapping[str, object]) -> BertConfig | None:
    """raw: the contents of config.json. None: it is no BERT, or one of an unusual kind.

    Raises:
      ModelNotSupportedError: the file is damaged.
    """
    family = family_of(architecture)
    if family not in _NAMES:
        return None
    config = _distilbert(raw) if family == "DistilBert" else _bert(family, raw)
    if config is None or config.hidden_size % config.num_heads:
        return None
    return config


def _bert(family: str, raw: Mapping[str, object]) -> BertConfig | None:
    parsed = read_config(raw, _BertJson)
    activation = _ACTIVATIONS.get(parsed.hidden_act)
    if activation is None or parsed.is_decoder or parsed.position_embedding_type not in {None, "absolute"}:
        return None
    padding = 1 if parsed.pad_token_id is None else parsed.pad_token_id
    return BertConfig(
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        num_layers=parsed.num_hidden_layers,
        num_heads=parsed.num_attention_heads,
        intermediate_size=parsed.intermediate_size,
        norm_eps=parsed.layer_norm_eps,
        activation=activation,
        num_positions=parsed.max_position_embeddings,
        first_position=0 if family == "Bert" else padding + 1,
        num_types=parsed.type_vocab_size,
        names=_NAMES[family],
    )


def _distilbert(raw: Mapping[str, object]) -> BertConfig | None:
    parsed = read_config(raw, _DistilBertJson)
    activation = _ACTIVATIONS.get(parsed.activation)
    if activation is None:
        return None
    return BertConfig(
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.dim,
        num_layers=parsed.n_layers,
        num_heads=parsed.n_heads,
        intermediate_size=parsed.hidden_dim,
        norm_eps=1e-12,
        activation=activation,
        num_positions=parsed.max_position_embeddings,
        first_position=0,
        num_types=0,
        names=DISTILBERT_NAMES,
    )
