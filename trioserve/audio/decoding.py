"""From the bytes of an audio file to samples, by FFmpeg's libraries (PyAV).

A file is not trusted. It is read from memory, by demuxers and decoders that are named here, and none of them
can open anything else: no playlists, no network. What it claims is checked against the limits before it is
decoded, and what it turns out to be while it is.
"""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, Any, NoReturn

import av
import numpy as np

from trioserve.audio.speech import Speech
from trioserve.audio.wav_header import wav_duration
from trioserve.audio_input import SAMPLING_RATE
from trioserve.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from numpy.typing import NDArray

    from trioserve.audio.limits import AudioLimits

__all__ = ["decode_audio"]

_FORMATS = "wav", "w64", "aiff", "flac", "mp3", "aac", "ogg", "mov", "matroska", "caf", "amr"

_CODECS = (
    "aac", "alac", "amrnb", "amrwb", "flac", "mp3", "mp3float", "mp2", "mp2float", "opus", "vorbis",
    "adpcm_ima_wav", "adpcm_ms", "gsm", "gsm_ms", "libopencore_amrnb", "libopencore_amrwb",
    "pcm_alaw", "pcm_mulaw", "pcm_f32be", "pcm_f32le", "pcm_f64be", "pcm_f64le",
    "pcm_s8", "pcm_s16be", "pcm_s16le", "pcm_s24be", "pcm_s24le", "pcm_s32be", "pcm_s32le", "pcm_s64le",
    "pcm_u8",
)  # fmt: skip

_OPTIONS = {"format_whitelist": ",".join(_FORMATS), "codec_whitelist": ",".join(_CODECS)}

_KNOW_THEIR_LENGTH = ("wav", "w64", "aiff", "flac", "caf", "mov,mp4,m4a,3gp,3g2,mj2")
"""The headers of the others say nothing of it, or it is estimated from the first frames."""

_SUPPORTED = "WAV, FLAC, MP3, Ogg (Opus, Vorbis), M4A/MP4 (AAC), WebM, AIFF, CAF or AMR"

_ENOUGH, _SLACK = 0.9, 0.02
"""A file must have this share of its length, less so many seconds: headers are not exact, damaged parts are
skipped, and what is shorter than a filter is lost in resampling."""


def _no_check() -> None:
    pass


def decode_audio(data: bytes, limits: AudioLimits, check: Callable[[], None] = _no_check) -> Speech:
    """The audio of a file. Blocking: for a worker thread.

    Args:
      check: called between frames (some milliseconds each); what it raises ends the decoding.

    Raises:
      InvalidRequestError: it is no audio in a known format, is cut off or damaged, or is beyond the limits.
        `parameter` is "file".
    """
    if len(data) > limits.max_bytes:
        raise _refuse(f"must be at most {limits.max_bytes} bytes, got {len(data)}")
    if not data:
        raise _refuse("must be an audio file, got an empty one")
    try:
        with av.open(io.BytesIO(data), "r", container_options=_OPTIONS, io_open=_open_nothing) as container:
            stream = _find_stream(container)
            declared = wav_duration(data) or _declared_duration(container, stream)
            _check_duration(declared, limits, " by its header")
            samples = _decode(_frames(container, stream), limits, check)
    except (av.FFmpegError, UnicodeDecodeError) as error:
        raise _refuse(f"must be {_SUPPORTED}, got something that is not, or is damaged") from error
    if declared is not None and len(samples) < (_ENOUGH * declared - _SLACK) * SAMPLING_RATE:
        found = len(samples) / SAMPLING_RATE
        raise _refuse(
            f"must be whole, got one that is cut off or damaged: of {declared:.2f} s by its header, "
            f"{found:.2f} s could be decoded"
        )
    if not len(samples):
        raise _refuse("must have audio in it, got none that could be decoded")
    return Speech(samples)


def _refuse(sentence: str) -> InvalidRequestError:
    return InvalidRequestError(f"file {sentence}.", parameter="file")


def _open_nothing(url: str, flags: int, options: Any) -> NoReturn:
    raise _refuse("must not refer to other files, got one that does")


def _find_stream(container: InputContainer) -> AudioStream:
    if not container.streams.audio:
        raise _refuse("must have audio in it, got one without (a video without sound, for example)")
    stream = container.streams.audio[0]
    codec = stream.codec_context  # None, whatever its type says, where there is no decoder
    if not codec or codec.codec.name not in _CODECS:
        raise _refuse(f"must be {_SUPPORTED}, got a codec that is not supported")
    return stream


def _declared_duration(container: InputContainer, stream: AudioStream) -> float | None:
    """Seconds, where the file itself says so."""
    if container.format.name not in _KNOW_THEIR_LENGTH or stream.duration is None or stream.time_base is None:
        return None
    return float(stream.duration * stream.time_base)


def _check_duration(seconds: float | None, limits: AudioLimits, how: str = "") -> None:
    if seconds is not None and seconds > limits.max_duration:
        raise _refuse(f"must be at most {limits.max_duration:g} s long, got {seconds:.1f} s{how}")


def _frames(container: InputContainer, stream: AudioStream) -> Iterator[av.AudioFrame]:
    """Those that can be decoded: a packet that cannot is left out, as players do."""
    for packet in container.demux(stream):
        try:
            yield from packet.decode()
        except av.error.InvalidDataError:
            continue


def _decode(
    frames: Iterator[av.AudioFrame], limits: AudioLimits, check: Callable[[], None]
) -> NDArray[np.float32]:
    resampler = av.AudioResampler(format="fltp", rate=SAMPLING_RATE)
    samples = bytearray()  # grows in place: a list of pieces would be there twice in the end
    must_end = time.monotonic() + limits.max_decode_seconds
    frame = None
    for frame in frames:
        check()
        if time.monotonic() > must_end:
            raise _refuse(f"must be decoded in {limits.max_decode_seconds:g} s, got one that takes longer")
        _append(samples, resampler.resample(frame))
        _check_duration(len(samples) / 4 / SAMPLING_RATE, limits, " or more")
    if frame is not None:
        _append(samples, resampler.resample(None))
    decoded = np.frombuffer(samples, dtype=np.float32)
    if not np.isfinite(decoded).all():
        raise _refuse("must have finite samples, got some that are no numbers")
    return np.clip(decoded, -1, 1, out=decoded)


def _append(samples: bytearray, frames: list[av.AudioFrame]) -> None:
    """The mean of the channels: FFmpeg's own sum may be louder than any of them."""
    for frame in frames:
        channels = frame.to_ndarray()
        samples += (channels[0] if len(channels) == 1 else channels.mean(axis=0)).data
