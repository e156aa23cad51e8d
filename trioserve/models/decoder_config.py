"""From an architecture and its config.json to the shape of a decoder. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from trioserve.models.config_gemma3 import gemma3_config
from trioserve.models.config_llama import llama_config
from trioserve.models.config_qwen2 import qwen2_config
from trioserve.models.registry import check_supported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trioserve.models.config import DecoderConfig

__all__ = ["decoder_config"]

_READERS: Final = {
    "Gemma3ForCausalLM": gemma3_config,
    "LlamaForCausalLM": llama_config,
    "Qwen2ForCausalLM": qwen2_config,
}
"""The architectures of `trioserve.models.registry`."""


def decoder_config(architecture: str, raw: Mapping[str, Any]) -> DecoderConfig:
    """raw: the contents of config.json.

    Raises:
      ModelNotSupportedError: there is no native implementation, or config.json asks for what it has not.
    """
    check_supported(architecture)
    return _READERS[architecture](raw)
