"""The special tokens by which a speech model is told what to write, and says when something was heard."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from trioserve.errors import ModelNotSupportedError

if TYPE_CHECKING:
    from trioserve.frontend.tokenizer import Tokenizer

__all__ = ["SECONDS_PER_TIMESTAMP", "SpeechTokens"]

SECONDS_PER_TIMESTAMP = 0.02

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_ENGLISH_ONLY_EOT = 50_256
"""Models of English alone have GPT-2's vocabulary; the others' has one token more."""


@attrs.frozen(kw_only=True)
class SpeechTokens:
    """Token ids of Whisper. A prompt for the decoder, and what it answers:

        [prev, text before ...] sot [language, transcribe | translate] [no_timestamps]    text ... eot

    Language and task are for models with `is_multilingual` only. Without `no_timestamps`, the text lies
    between timestamps: `timestamp_begin` + n stands for n * `SECONDS_PER_TIMESTAMP` seconds.
    """

    sot: int
    """<|startoftranscript|>"""
    eot: int
    """<|endoftext|>; all tokens from here on are special, all below are text."""
    prev: int
    """<|startofprev|>"""
    transcribe: int
    translate: int
    no_timestamps: int
    no_speech: int
    """How likely it is to follow `sot` says how likely there is no speech."""
    timestamp_begin: int
    """<|0.00|>"""
    languages: Mapping[str, int]
    """By ISO 639 code, e.g. "en"."""
    is_multilingual: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SpeechTokens:
        """
        Raises:
          ModelNotSupportedError: one of them is lacking, so this is no tokenizer of Whisper.
        """
        added = tokenizer.added_tokens
        eot = _find(added, "endoftext")
        no_timestamps = _find(added, "notimestamps")
        matches = ((_LANGUAGE.fullmatch(text), token) for text, token in added.items())
        return cls(
            sot=_find(added, "startoftranscript"),
            eot=eot,
            prev=_find(added, "startofprev"),
            transcribe=_find(added, "transcribe"),
            translate=_find(added, "translate"),
            no_timestamps=no_timestamps,
            no_speech=_find(added, "nospeech", "nocaptions"),
            timestamp_begin=no_timestamps + 1,
            languages={match[1]: token for match, token in matches if match is not None},
            is_multilingual=eot != _ENGLISH_ONLY_EOT,
        )

    def seconds(self, token_id: int) -> float | None:
        """The time that a timestamp stands for, within its window; None for any other token."""
        if token_id < self.timestamp_begin:
            return None
        return (token_id - self.timestamp_begin) * SECONDS_PER_TIMESTAMP


def _find(added: Mapping[str, int], *names: str) -> int:
    """The token of one of these names: it has changed over the years."""
    for name in names:
        if (token := added.get(f"<|{name}|>")) is not None:
            return token
    raise ModelNotSupportedError(
        f"The tokenizer has no token <|{names[0]}|>, so it is none of a speech model."
    )
