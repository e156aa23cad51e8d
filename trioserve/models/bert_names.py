"""What the tensors of a BERT are called in checkpoints."""

from __future__ import annotations

import attrs

__all__ = ["BERT_NAMES", "DISTILBERT_NAMES", "BertNames"]


@attrs.frozen(kw_only=True)
class BertNames:
    """Each without .weight and .bias."""

    base: str
    """What goes before all of them where the encoder is part of a larger model; some checkpoints have it, and
    some do not, whatever their config.json says."""
    word_embeddings: str = "embeddings.word_embeddings"
    position_embeddings: str = "embeddings.position_embeddings"
    type_embeddings: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    layer: str
    """Of a layer, before the following; with its number for {}."""
    query: str
    key: str
    value: str
    output: str
    attention_norm: str
    up: str
    down: str
    output_norm: str


BERT_NAMES = BertNames(
    base="bert.",
    layer="encoder.layer.{}.",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    output_norm="output.LayerNorm",
)

DISTILBERT_NAMES = BertNames(
    base="distilbert.",
    layer="transformer.layer.{}.",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    output_norm="output_layer_norm",
)
