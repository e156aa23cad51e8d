"""Which model architectures have a native implementation, and where."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from trioserve.errors import ModelNotSupportedError

if TYPE_CHECKING:
    from trioserve.models.decoder import DecoderModel

__all__ = ["SPEECH", "SUPPORTED", "check_supported", "load_class"]

SUPPORTED: dict[str, str] = {
    "Gemma3ForCausalLM": "trioserve.models.gemma3:Gemma3ForCausalLM",
    "LlamaForCausalLM": "trioserve.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "trioserve.models.qwen2:Qwen2ForCausalLM",
}
"""Architecture, as in config.json's `architectures` -> "module:class". Reading it imports no torch."""

SPEECH = ("WhisperForConditionalGeneration",)
"""Architectures that hear; `trioserve.worker.whisper_executor` runs them."""


def load_class(architecture: str) -> type[DecoderModel]:
    """The class that implements an architecture; imports its module, and torch with it.

    Raises:
      ModelNotSupportedError: there is none.
    """
    check_supported(architecture)
    module, name = SUPPORTED[architecture].split(":")
    model_class: type[DecoderModel] = getattr(importlib.import_module(module), name)
    return model_class


def check_supported(architecture: str) -> None:
    """Raises ModelNotSupportedError: there is no native implementation."""
    if architecture not in SUPPORTED:
        raise ModelNotSupportedError(
            f"There is no native implementation of {architecture}; supported: {', '.join(sorted(SUPPORTED))}."
        )
