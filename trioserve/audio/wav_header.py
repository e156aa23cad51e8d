"""What a WAV file says of its own length.

FFmpeg believes the size of the file more than that of its data chunk, and so does not see that a file is cut
off.
"""

from __future__ import annotations

import struct

__all__ = ["wav_duration"]

_UNKNOWN = 0x7FFF0000
"""Sizes from here on, and 0, are written by programs that did not know yet how much would follow."""


def wav_duration(data: bytes) -> float | None:
    """Seconds; None if it is no WAV file, or does not say."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return None
    bytes_per_second = 0
    position = 12
    while position + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, position)
        position += 8
        if name == b"data":
            known = 0 < size < _UNKNOWN and bytes_per_second > 0
            return size / bytes_per_second if known else None
        if name == b"fmt " and size >= 16 and position + 16 <= len(data):
            rate, block = struct.unpack_from("<4xI4xH", data, position)
            bytes_per_second = rate * block
        position += size + size % 2
    return None
