"""Texts and pairs of texts to token ids, whole, truncated or in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.frontend.prompts import PairPrompt, TextPrompt, TokensPrompt, Truncation

if TYPE_CHECKING:
    import tokenizers

    from trioserve.frontend.tokenizer import Tokenizer

__all__ = ["PoolingText", "PoolingTokenizer", "Prompt"]

Prompt: TypeAlias = TextPrompt | TokensPrompt | PairPrompt


@attrs.frozen(eq=False)
class PoolingText:
    """What the engine is given."""

    token_ids: Sequence[int]
    type_ids: bytes = b""
    """uint8 per token: which text of a pair it belongs to; empty: all 0."""


class PoolingTokenizer:
    """Blocking, and without a state: may be used in any thread. The library releases the GIL."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def tokenize(self, prompts: Sequence[Prompt], *, in_pieces: bool) -> list[Sequence[PoolingText]]:
        """What becomes of each prompt. One text, however long it is; or with `in_pieces`, where it is no pair
        and too long for the model, its pieces: each as long as the model takes it, with its own special
        tokens.

        Raises:
          InvalidRequestError: a truncation leaves no room for text.
        """
        whole = self._whole([prompt for prompt in prompts if _is_plain(prompt)])
        texts = [
            self._cut(prompt, next(whole)) if _is_plain(prompt) else self._one(prompt) for prompt in prompts
        ]
        return [
            self._pieces(prompt)
            if in_pieces and len(text.token_ids) > self._max_model_len and not isinstance(prompt, PairPrompt)
            else [text]
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def _whole(self, prompts: Sequence[Prompt]) -> Iterator[PoolingText]:
        """All in one call of the library."""
        inputs = [
            (prompt.text, prompt.text_pair) if isinstance(prompt, PairPrompt) else prompt.text
            for prompt in prompts
        ]
        return map(_to_text, self._tokenizer.backend.encode_batch_fast(inputs))

    def _cut(self, prompt: Prompt, text: PoolingText) -> PoolingText:
        """What the prompt's truncation leaves: tokenized once more only where it acts."""
        truncation = None if isinstance(prompt, TokensPrompt) else prompt.truncation
        if truncation is None or len(text.token_ids) <= truncation.max_tokens:
            return text
        return self._one(prompt)

    def _one(self, prompt: Prompt) -> PoolingText:
        if isinstance(prompt, TokensPrompt):
            return PoolingText(prompt.token_ids)
        is_pair, adds_special = isinstance(prompt, PairPrompt), True
        if isinstance(prompt, TextPrompt):
            adds_special = prompt.add_special_tokens
        texts = [prompt.text, prompt.text_pair] if isinstance(prompt, PairPrompt) else [prompt.text]
        parts = self._tokenizer.encode_plainly(texts)
        if prompt.truncation is not None:
            num_special = self._num_special(is_pair=is_pair) if adds_special else 0
            _truncate(parts, prompt.truncation, num_special)
        return _to_text(self._tokenizer.finish(*parts) if adds_special else parts[0])

    def _pieces(self, prompt: TextPrompt | TokensPrompt) -> Sequence[PoolingText]:
        most = self._max_model_len
        if isinstance(prompt, TokensPrompt):
            return [
                PoolingText(prompt.token_ids[start : start + most])
                for start in range(0, len(prompt.token_ids), most)
            ]
        (plain,) = self._tokenizer.encode_plainly([prompt.text])
        if not prompt.add_special_tokens:
            plain.truncate(most)
            return [_to_text(piece) for piece in (plain, *plain.overflowing)]
        plain.truncate(most - self._num_special(is_pair=False))
        first = self._tokenizer.finish(plain)
        return [_to_text(piece) for piece in (first, *first.overflowing)]

    def _num_special(self, *, is_pair: bool) -> int:
        return self._tokenizer.num_special_tokens(is_pair=is_pair)


def _is_plain(prompt: Prompt) -> bool:
    return prompt.add_special_tokens if isinstance(prompt, TextPrompt) else isinstance(prompt, PairPrompt)


def _to_text(encoding: tokenizers.Encoding) -> PoolingText:
    type_ids = encoding.type_ids
    return PoolingText(encoding.ids, bytes(type_ids) if any(type_ids) else b"")


def _truncate(parts: Sequence[tokenizers.Encoding], truncation: Truncation, num_special: int) -> None:
    """Cut the texts (one or two), so that they have at most so many tokens with their special ones."""
    room = truncation.max_tokens - num_special
    if room < 1:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be at least {num_special + 1}, of which {num_special} are special "
            f"tokens, got {truncation.max_tokens}.",
            parameter="truncate_prompt_tokens",
        )
    direction = "left" if truncation.keeps_end else "right"
    for part, most in zip(parts, _shares([len(part) for part in parts], room), strict=True):
        if len(part) > most:
            part.truncate(most, direction=direction)


def _shares(lengths: Sequence[int], room: int) -> Sequence[int]:
    """What each text gets of the room. Of two, the longer one is cut first, to the length of the other one,
    and then both, as the tokenizers library does it by its strategy "longest_first"."""
    if len(lengths) == 1 or sum(lengths) <= room:
        return lengths if sum(lengths) <= room else [room]
    shorter = min(lengths)
    longer = max(shorter, room - shorter) if shorter <= room else shorter
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return [shorter, longer] if lengths[0] <= lengths[1] else [longer, shorter]
