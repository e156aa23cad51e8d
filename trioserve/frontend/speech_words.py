"""Words of some text, and when they are said, by the times at which its tokens begin.

As OpenAI's Whisper makes them: a word begins with a space, or with each character in languages that write
none; punctuation belongs to the word that it stands at.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

import attrs

from trioserve.frontend.detokenizer import Detokenizer
from trioserve.frontend.transcription_outputs import SpeechWord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trioserve.frontend.tokenizer import Tokenizer

__all__ = ["find_words"]

_WITHOUT_SPACES = {"zh", "ja", "th", "lo", "my", "yue"}
_BEFORE = "\"'“¿([{-"
_AFTER = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001 - those of Chinese


@attrs.define
class _Part:
    text: str
    start: float
    end: float


def find_words(
    token_ids: Sequence[int], times: Sequence[float], tokenizer: Tokenizer, *, language: str
) -> list[SpeechWord]:
    """`times` has one more than `token_ids`, which are text: the last is the end."""
    parts = list(_characters(token_ids, times, tokenizer))
    if language not in _WITHOUT_SPACES:
        parts = _join_at_spaces(parts)
    _merge_before(parts)
    _merge_after(parts)
    return [
        SpeechWord(word=part.text.strip(), start=part.start, end=part.end)
        for part in parts
        if part.text.strip()
    ]


def _characters(token_ids: Sequence[int], times: Sequence[float], tokenizer: Tokenizer) -> Iterator[_Part]:
    """Tokens; of those that have no whole character, as many as make one."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    start = times[0]
    for token, end in zip(token_ids, times[1:], strict=True):
        if text := detokenizer.push(token):
            yield _Part(text, start, end)
            start = end
    if text := detokenizer.flush():
        yield _Part(text, start, times[-1])


def _join_at_spaces(parts: Sequence[_Part]) -> list[_Part]:
    words: list[_Part] = []
    for part in parts:
        begins = part.text.startswith(" ") or part.text.strip() in string.punctuation
        if begins or not words:
            words.append(part)
        else:
            words[-1] = _joined(words[-1], part)
    return words


def _joined(first: _Part, second: _Part) -> _Part:
    return _Part(first.text + second.text, first.start, second.end)


def _merge_before(parts: list[_Part]) -> None:
    """An opening bracket goes to the word that follows."""
    for index in range(len(parts) - 2, -1, -1):
        part = parts[index]
        if part.text.startswith(" ") and part.text.strip() in _BEFORE:
            parts[index : index + 2] = [_joined(part, parts[index + 1])]


def _merge_after(parts: list[_Part]) -> None:
    """A full stop goes to the word that it follows, and says nothing of when that ends."""
    index = 1
    while index < len(parts):
        before, part = parts[index - 1], parts[index]
        if not before.text.endswith(" ") and part.text in _AFTER:
            parts[index - 1 : index + 1] = [_Part(before.text + part.text, before.start, before.end)]
        else:
            index += 1
