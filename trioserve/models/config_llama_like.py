"""What the config.json of families that follow Llama's have in common. Imports no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import attrs

from trioserve.models.config import DecoderConfig
from trioserve.models.config_json import RopeJson, check_heads, head_dim_of, rotary_config, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.models.config import LayerConfig, RotaryConfig

__all__ = ["LlamaLikeJson"]


@attrs.frozen(kw_only=True)
class LlamaLikeJson:
    """The keys that we read; the defaults are transformers'.

    The sizes have no default here: a file that leaves them out is damaged.
    """

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_key_value_heads: int | None = size(None)
    head_dim: int | None = size(None)
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = size(2048)
    hidden_act: Literal["silu"] = "silu"
    rope_theta: float = size(10000.0)
    rope_scaling: RopeJson | None = None
    rope_parameters: RopeJson | None = None
    tie_word_embeddings: bool = False

    @property
    def rotary(self) -> RotaryConfig:
        """Raises ModelNotSupportedError for a kind of scaling that is not implemented."""
        return rotary_config(
            self.rope_parameters or self.rope_scaling,
            theta=self.rope_theta,
            context_length=self.max_position_embeddings,
        )

    def decoder_config(self, layers: Sequence[LayerConfig], **biases: Any) -> DecoderConfig:
        """biases: `qkv_bias`, `output_bias` and `mlp_bias` of `DecoderConfig`.

        Raises:
          ModelNotSupportedError: the heads do not fit together.
        """
        num_kv_heads = self.num_key_value_heads or self.num_attention_heads
        head_dim = head_dim_of(self)
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=check_heads(self.num_attention_heads, num_kv_heads),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            layers=tuple(layers),
            rms_norm_eps=self.rms_norm_eps,
            tie_word_embeddings=self.tie_word_embeddings,
            attention_scale=1 / math.sqrt(head_dim),
            **biases,
        )
