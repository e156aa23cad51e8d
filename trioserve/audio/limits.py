"""How much audio one file may be."""

from __future__ import annotations

import attrs

__all__ = ["AudioLimits"]


@attrs.frozen(kw_only=True)
class AudioLimits:
    max_bytes: int = 25 * 2**20
    """Of the file. OpenAI's and vLLM's limit."""
    max_duration: float = 7200.0
    """Seconds once it is decoded: two hours are 460 MB of samples."""
    max_decode_seconds: float = 30.0
    """That decoding may take."""
