"""The forms in which a prompt may be given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import attrs

from trioserve.audio_input import MAX_AUDIO_SECONDS, SAMPLING_RATE, SpeechSearch
from trioserve.errors import InvalidRequestError
from trioserve.validators import boolean, optional, reject, shown

__all__ = [
    "AudioPrompt",
    "PairPrompt",
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
    "Truncation",
    "parse_prompt",
    "to_prompts",
]

_MAX_AUDIO_SIZE = MAX_AUDIO_SECONDS * SAMPLING_RATE * 4


def _is_text(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str):
        raise reject(attribute, value, "a string")


@attrs.frozen
class Truncation:
    """What is left of a prompt that is too long."""

    max_tokens: int
    """At least 1."""
    keeps_end: bool = attrs.field(default=True, kw_only=True)
    """False: the beginning."""

    def of(self, token_ids: list[int]) -> list[int]:
        if self.keeps_end:
            return token_ids[-self.max_tokens :]
        return token_ids[: self.max_tokens]

    def of_text(self, text: str, most: int) -> str:
        """At most `most` characters of it, at the same end."""
        return text[-most:] if self.keeps_end else text[:most]


@attrs.frozen
class TextPrompt:
    """Text that is to be tokenized."""

    text: str = attrs.field(validator=_is_text)
    add_special_tokens: bool = attrs.field(default=True, validator=boolean)
    """False where the text has them already, as a rendered chat template does."""
    cache_salt: str | None = None
    """Prefix cache blocks are shared only among requests with the same salt."""
    truncation: Truncation | None = None
    """If it acts, outputs show no text of the prompt."""


@attrs.frozen
class TokensPrompt:
    """Token ids, taken as they are."""

    token_ids: Sequence[int]
    text: str | None = attrs.field(default=None, validator=optional(_is_text))
    """Shown as the output's `prompt`; not tokenized."""
    cache_salt: str | None = None
    """As of a TextPrompt."""


def _is_audio(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    allowed = f"float32 samples of more than 0 and at most {MAX_AUDIO_SECONDS} seconds at {SAMPLING_RATE} Hz"
    if not isinstance(value, bytes):
        raise reject(attribute, type(value).__name__, f"bytes: {allowed}")
    if not 0 < len(value) <= _MAX_AUDIO_SIZE or len(value) % 4:
        raise reject(attribute, f"{len(value)} bytes", allowed)


@attrs.frozen
class AudioPrompt:
    """For a speech model: what it hears, and how its text begins."""

    samples: bytes = attrs.field(validator=_is_audio, repr=False)
    """float32 in native byte order, one channel, 16 kHz, at most 30 seconds. Equal audio is encoded once, as
    long as it is not too long ago."""
    token_ids: Sequence[int]
    """Of the decoder's prompt, as `trioserve.frontend.speech_tokens` draws it."""
    cache_salt: str | None = None
    """As of a TextPrompt."""
    search: SpeechSearch | None = None
    """Its text is found by beam search, which tells of nothing before its end. The params must be those of
    greedy decoding, without anything that changes what is likely."""


@attrs.frozen
class PairPrompt:
    """Two texts that a model looks at together, for `encode` of a model that pools."""

    text: str = attrs.field(validator=_is_text)
    text_pair: str = attrs.field(validator=_is_text)
    truncation: Truncation | None = None
    """Of both together: the longer one loses first."""


PromptType: TypeAlias = str | Sequence[int] | Mapping[str, Any] | TextPrompt | TokensPrompt | AudioPrompt
"""Text, token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or one of the classes above. A dict may
have a `cache_salt`, too."""


def to_prompts(prompts: PromptType | Sequence[PromptType]) -> Sequence[PromptType]:
    """One prompt becomes a list of it. A list that begins with an integer is one prompt of token ids."""
    if isinstance(prompts, Sequence) and not isinstance(prompts, str):
        is_many = not prompts or not isinstance(prompts[0], int)
        return cast("Sequence[PromptType]", prompts if is_many else [prompts])
    return [prompts]


def parse_prompt(prompt: PromptType) -> TextPrompt | TokensPrompt | AudioPrompt:
    """One of the three classes for whatever form was given.

    Raises:
      TypeError: it is none of the forms.
      InvalidRequestError: the token ids are no integers >= 0.
    """
    match prompt:
        case TextPrompt():
            return prompt
        case TokensPrompt() | AudioPrompt():
            return attrs.evolve(prompt, token_ids=_checked(prompt.token_ids))
        case str():
            return TextPrompt(prompt)
        case {"prompt_token_ids": token_ids, **rest}:
            shown = rest.get("prompt")
            return TokensPrompt(_checked(token_ids), None if shown is None else str(shown), _salt(rest))
        case {"prompt": text, **rest}:
            return TextPrompt(text, cache_salt=_salt(rest))
        case Mapping():
            raise TypeError(
                f"a prompt as a dict needs 'prompt' or 'prompt_token_ids', got keys {list(prompt)}"
            )
        case Sequence():
            return TokensPrompt(_checked(prompt))
    raise TypeError(f"a prompt is a string, a list of token ids or a dict, got {type(prompt).__name__}")


def _salt(prompt: Mapping[Any, Any]) -> Any:
    return prompt.get("cache_salt")


def _checked(given: Any) -> Sequence[int]:
    if not isinstance(given, Iterable):
        raise InvalidRequestError(
            f"prompt token ids must be a list of integers, got {shown(given)}.", parameter="prompt"
        )
    token_ids = list(given)
    if set(map(type, token_ids)) <= {int} and min(token_ids, default=0) >= 0:
        return token_ids  # without a look at each: they may be many
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise InvalidRequestError(
                f"prompt token ids must be integers >= 0, got {shown(token_id)}.", parameter="prompt"
            )
    return token_ids
