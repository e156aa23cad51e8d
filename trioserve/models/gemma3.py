"""Gemma 3's text models: norms before and after attention and MLP, and on queries and keys; a GELU-gated MLP;
most layers see a window only, and rotate by other frequencies than those that see everything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.models.causal_lm import CausalLM
from trioserve.models.config_gemma3 import gemma3_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["Gemma3ForCausalLM"]


class Gemma3ForCausalLM(CausalLM):
    """See `trioserve.models.decoder.DecoderModel`."""

    def __init__(self, raw_config: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__(gemma3_config(raw_config), dtype)
