"""The config.json of Whisper. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trioserve.audio_input import MAX_AUDIO_SECONDS
from trioserve.errors import ModelNotSupportedError
from trioserve.models.config_json import read_config, size

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SeenLayer", "WhisperConfig", "whisper_config"]

_NUM_FRAMES = MAX_AUDIO_SECONDS * 50


@attrs.frozen
class SeenLayer:
    """A decoder layer, as far as its attention to the text goes."""

    window: None = None
    """It sees everything."""


@attrs.frozen(kw_only=True)
class WhisperConfig:
    """Invariants: every size is positive, and hidden_size a multiple of both numbers of heads."""

    vocab_size: int
    hidden_size: int
    num_mel_bins: int
    num_frames: int
    """Of an encoded window: half as many as it has mel frames."""
    context_length: int
    """Of the text."""
    num_encoder_layers: int
    num_encoder_heads: int
    encoder_inner: int
    """Width of the encoder's MLPs."""
    num_decoder_layers: int
    num_heads: int
    """Of the decoder."""
    decoder_inner: int

    # What attention over the paged cache asks for.

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def layers(self) -> tuple[SeenLayer, ...]:
        return (SeenLayer(),) * self.num_decoder_layers


@attrs.frozen(kw_only=True)
class _WhisperJson:
    vocab_size: int = size()
    d_model: int = size()
    num_mel_bins: int = size(80)
    max_source_positions: int = size(1500)
    max_target_positions: int = size(448)
    encoder_layers: int = size()
    encoder_attention_heads: int = size()
    encoder_ffn_dim: int = size()
    decoder_layers: int = size()
    decoder_attention_heads: int = size()
    decoder_ffn_dim: int = size()
    activation_function: str = "gelu"
    scale_embedding: bool = False


def whisper_config(raw: Mapping[str, Any]) -> WhisperConfig:
    """raw: the contents of config.json.

    Raises:
      ModelNotSupportedError: keys are missing or wrong, or ask for what is not implemented.
    """
    parsed = read_config(raw, _WhisperJson)
    for heads in (parsed.encoder_attention_heads, parsed.decoder_attention_heads):
        if parsed.d_model % heads:
            raise ModelNotSupportedError(
                f"config.json: d_model must be a multiple of the number of heads ({heads}), "
                f"got {parsed.d_model}."
            )
    if parsed.max_source_positions != _NUM_FRAMES:
        raise ModelNotSupportedError(
            f"config.json: max_source_positions must be {_NUM_FRAMES}, got {parsed.max_source_positions}."
        )
    if parsed.activation_function != "gelu" or parsed.scale_embedding:
        raise ModelNotSupportedError(
            "config.json: activation_function must be gelu, and scale_embedding false, "
            f"got {parsed.activation_function!r} and {parsed.scale_embedding}."
        )
    return WhisperConfig(
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.d_model,
        num_mel_bins=parsed.num_mel_bins,
        num_frames=parsed.max_source_positions,
        context_length=parsed.max_target_positions,
        num_encoder_layers=parsed.encoder_layers,
        num_encoder_heads=parsed.encoder_attention_heads,
        encoder_inner=parsed.encoder_ffn_dim,
        num_decoder_layers=parsed.decoder_layers,
        num_heads=parsed.decoder_attention_heads,
        decoder_inner=parsed.decoder_ffn_dim,
    )
