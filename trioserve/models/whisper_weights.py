"""The tensors of a Whisper checkpoint: names and shapes. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trioserve.models.config_whisper import WhisperConfig

__all__ = ["cross_products", "is_redundant", "whisper_shapes"]

Shapes = dict[str, tuple[int, ...]]


def is_redundant(name: str) -> bool:
    """The output matrix is the embedding matrix."""
    return name == "proj_out.weight"


def whisper_shapes(config: WhisperConfig) -> Shapes:
    """By name, as Hugging Face's checkpoints have them. Keys have no bias."""
    hidden, mels = config.hidden_size, config.num_mel_bins
    shapes: Shapes = {
        "model.encoder.conv1.weight": (hidden, mels, 3),
        "model.encoder.conv1.bias": (hidden,),
        "model.encoder.conv2.weight": (hidden, hidden, 3),
        "model.encoder.conv2.bias": (hidden,),
        "model.encoder.embed_positions.weight": (config.num_frames, hidden),
        "model.decoder.embed_tokens.weight": (config.vocab_size, hidden),
        "model.decoder.embed_positions.weight": (config.context_length, hidden),
        **_norm("model.encoder.layer_norm", hidden),
        **_norm("model.decoder.layer_norm", hidden),
    }
    for layer in range(config.num_encoder_layers):
        prefix = f"model.encoder.layers.{layer}"
        shapes |= dict(_layer(prefix, hidden, config.encoder_inner, ["self_attn"]))
    for layer in range(config.num_decoder_layers):
        prefix = f"model.decoder.layers.{layer}"
        shapes |= dict(_layer(prefix, hidden, config.decoder_inner, ["self_attn", "encoder_attn"]))
    return shapes


def cross_products(config: WhisperConfig) -> list[str]:
    """Keys and values of all layers' cross-attention, below model.decoder."""
    layers = range(config.num_decoder_layers)
    return [f"layers.{layer}.encoder_attn.{name}_proj" for layer in layers for name in ("k", "v")]


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _layer(
    prefix: str, hidden: int, inner: int, attentions: list[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    for attention in attentions:
        for product in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield f"{prefix}.{attention}.{product}.weight", (hidden, hidden)
            if product != "k_proj":
                yield f"{prefix}.{attention}.{product}.bias", (hidden,)
        yield from _norm(f"{prefix}.{attention}_layer_norm", hidden).items()
    yield from {f"{prefix}.fc1.weight": (inner, hidden), f"{prefix}.fc1.bias": (inner,)}.items()
    yield from {f"{prefix}.fc2.weight": (hidden, inner), f"{prefix}.fc2.bias": (hidden,)}.items()
    yield from _norm(f"{prefix}.final_layer_norm", hidden).items()
