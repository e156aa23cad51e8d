"""The Llama family: pre-norm blocks of rotary grouped-query attention and a SiLU-gated MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.models.causal_lm import CausalLM
from trioserve.models.config_llama import llama_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["LlamaForCausalLM"]


class LlamaForCausalLM(CausalLM):
    """See `trioserve.models.decoder.DecoderModel`."""

    def __init__(self, raw_config: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__(llama_config(raw_config), dtype)
