"""The GGUF architectures that can be converted. Imports no numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.errors import ModelNotSupportedError
from trioserve.model_sources.gguf_gemma3 import GEMMA3
from trioserve.model_sources.gguf_llama import LLAMA
from trioserve.model_sources.gguf_qwen2 import QWEN2

if TYPE_CHECKING:
    from trioserve.model_sources.gguf_architecture import GgufArchitecture
    from trioserve.model_sources.gguf_header import GgufHeader

__all__ = ["architecture_of"]

_ARCHITECTURES = {"gemma3": GEMMA3, "llama": LLAMA, "qwen2": QWEN2}
"""By general.architecture."""


def architecture_of(header: GgufHeader, *, where: str) -> GgufArchitecture:
    """Raises ModelNotSupportedError if this GGUF architecture cannot be converted."""
    try:
        return _ARCHITECTURES[header.architecture]
    except KeyError:
        raise ModelNotSupportedError(
            f"{where} has the GGUF architecture {header.architecture!r}, which is not supported. "
            f"Supported in .gguf files are: {', '.join(_ARCHITECTURES)}."
        ) from None
