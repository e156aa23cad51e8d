"""Audio files for tests."""

from __future__ import annotations

import io
import struct
from typing import Any

import av
import httpx2
import numpy as np


def tone(seconds: float, *, rate: int = 44_100, pitch: float = 440.0, channels: int = 2) -> np.ndarray:
    """float32 [channels, n]: a sine of amplitude 0.3, louder in the left channel than in the others."""
    wave = np.sin(2 * np.pi * pitch * np.arange(int(rate * seconds)) / rate).astype(np.float32)
    return np.stack([wave * (0.3 if channel == 0 else 0.1) for channel in range(channels)])


def silence(seconds: float, *, rate: int) -> np.ndarray:
    """float32 [1, n]"""
    return np.zeros((1, int(rate * seconds)), np.float32)


def encode(samples: np.ndarray, container: str, codec: str, *, rate: int = 44_100) -> bytes:
    """An audio file of float32 [channels, n], by FFmpeg. Of more than two channels: as many as 5.1 has."""
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(samples)]
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=rate)
        stream.layout = layout
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
        frame.sample_rate = rate
        resampler = av.AudioResampler(format=stream.format.name, layout=layout, rate=rate, frame_size=4096)
        for piece in (*resampler.resample(frame), *resampler.resample(None)):
            output.mux(stream.encode(piece))
        output.mux(stream.encode(None))
    return file.getvalue()


def wav(
    samples: bytes, *, rate: int = 16_000, bits: int = 16, channels: int = 1, claims: int | None = None
) -> bytes:
    """A WAV file of PCM samples; its header `claims` so many bytes of them."""
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * block, block, bits)
    size = len(samples) if claims is None else claims
    return b"".join(
        [b"RIFF", struct.pack("<I", min(36 + size, 2**32 - 1)), b"WAVEfmt ", struct.pack("<I", 16), form,
         b"data", struct.pack("<I", size), samples]
    )  # fmt: skip


def video_without_sound() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream: Any = output.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for _ in range(5):
            output.mux(stream.encode(av.VideoFrame(64, 64, "yuv420p")))
        output.mux(stream.encode(None))
    return file.getvalue()


def form(file: bytes | None, **fields: Any) -> tuple[bytes, dict[str, str]]:
    """A body, as httpx writes it, and its headers. A field with a list occurs several times."""
    files = None if file is None else {"file": ("clip.wav", file, "audio/wav")}
    request = httpx2.Request("POST", "http://x", data=fields, files=files or {"none": ("x", b"")})
    return request.read(), {"content-type": request.headers["content-type"]}
