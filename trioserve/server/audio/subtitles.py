"""Segments as subtitles: SubRip and WebVTT."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.frontend.transcription_outputs import SpeechSegment

__all__ = ["to_srt", "to_vtt"]


def to_srt(segments: Sequence[SpeechSegment]) -> str:
    """SubRip: numbered, with decimal commas."""
    return "".join(
        f"{number}\n{_time(segment.start, ',')} --> {_time(segment.end, ',')}\n{_line(segment.text)}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def to_vtt(segments: Sequence[SpeechSegment]) -> str:
    """WebVTT (W3C)."""
    cues = (
        f"{_time(segment.start, '.')} --> {_time(segment.end, '.')}\n{_escape(_line(segment.text))}\n\n"
        for segment in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def _time(seconds: float, point: str) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}{point}{milliseconds:03}"


def _line(text: str) -> str:
    """One line, without what would end a cue or look like the times of one."""
    return " ".join(text.split()).replace("-->", "->")


def _escape(text: str) -> str:
    """Without what would be markup in a cue."""
    return text.replace("&", "&amp;").replace("<", "&lt;")
