"""Qwen2 and Qwen2.5: Llama's blocks with biases on queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.models.causal_lm import CausalLM
from trioserve.models.config_qwen2 import qwen2_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["Qwen2ForCausalLM"]


class Qwen2ForCausalLM(CausalLM):
    """See `trioserve.models.decoder.DecoderModel`."""

    def __init__(self, raw_config: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__(qwen2_config(raw_config), dtype)
