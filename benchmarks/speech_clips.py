"""Sentences, spoken by espeak-ng, and how well they were understood."""

from __future__ import annotations

import re
import subprocess
import wave
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SENTENCES", "Clips", "speak", "word_error_rate"]

SENTENCES = (
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "She opened the window and listened to the rain falling on the roof.",
    "Every morning the old man walks to the market to buy fresh bread.",
    "We should leave before sunset if we want to reach the village today.",
    "The children were playing in the garden while their mother cooked dinner.",
    "A good book can take you to places that you have never seen before.",
    "He forgot his keys on the table and had to come back again.",
    "The train to London leaves from platform number seven in ten minutes.",
    "Nobody knows what happened to the ship after it left the harbour.",
    "Please remember to turn off the lights when you go to bed.",
)


class Clips(list[Path]):
    """One file per sentence, and one of all."""

    joined: Path


def speak(folder: Path, sentences: Sequence[str] = SENTENCES) -> Clips:
    """WAV files in `folder`; in the joined one there is half a second between sentences."""
    clips = Clips()
    for number, sentence in enumerate(sentences):
        path = folder / f"{number}.wav"
        subprocess.run(["espeak-ng", "-v", "en-us", "-s", "150", "-w", str(path), sentence], check=True)
        clips.append(path)
    clips.joined = folder / "joined.wav"
    with wave.open(str(clips.joined), "wb") as joined:
        for index, path in enumerate(clips):
            with wave.open(str(path)) as clip:
                if not index:
                    joined.setparams(clip.getparams())
                joined.writeframes(clip.readframes(clip.getnframes()) + bytes(clip.getframerate()))
    return clips


def word_error_rate(expected: Sequence[str], heard: Sequence[str]) -> float:
    """Words to insert, delete or replace, over the words that were said, without case and punctuation."""
    pairs = [(_words(text), _words(other)) for text, other in zip(expected, heard, strict=True)]
    return sum(_distance(*pair) for pair in pairs) / sum(len(words) for words, _ in pairs)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def _distance(expected: Sequence[str], heard: Sequence[str]) -> int:
    """Levenshtein's, of words."""
    row = list(range(len(heard) + 1))
    for number, word in enumerate(expected, 1):
        before, row = row, [number]
        for index, other in enumerate(heard, 1):
            row.append(min(before[index] + 1, row[-1] + 1, before[index - 1] + (word != other)))
    return row[-1]
