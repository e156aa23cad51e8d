"""Token ids to text as they come, never splitting a character."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.frontend.tokenizer import Tokenizer

__all__ = ["Detokenizer"]

_CONTEXT = 4
"""Tokens of the prompt that are looked back to; a character has at most four."""


class Detokenizer:
    """The text of one completion.

    What it returns, joined, is what `tokenizer.decode` of prompt and output has beyond the prompt's text. The
    exception are vocabularies that spell bytes as tokens (`<0xE2>`), where bytes that form no character may
    count differently.

    Args:
      context: the prompt, for tokenizers that drop a space at the beginning of a text.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        shown = list(context[-_CONTEXT:])
        # None: all text so far has been returned, and it ends with a whole character, so that a token with a
        # plain text needs no more than that.
        self._stream: DecodeStream | None = DecodeStream(ids=shown, skip_special_tokens=skip_special_tokens)
        # Invariant: the text of _shown has been returned, that of _held has not, and the two together are
        # enough context to decode _held.
        self._shown = shown
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is not whole."""
        plain_text = self._tokenizer.plain_text(token_id)
        if self._stream is None:
            if plain_text is not None:
                return plain_text
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        text = self._push(self._stream, token_id)
        if plain_text is not None and not self._held:
            self._stream, self._shown = None, []
        return text

    def _push(self, stream: DecodeStream, token_id: int) -> str:
        self._held.append(token_id)
        try:
            text = stream.step(self._tokenizer.backend, token_id)
        except Exception:  # a bare one, of the library: what came before reads differently after this token
            return self._start_over()
        if text is None:
            return ""
        self._shown, self._held = self._held, []
        return text

    def _start_over(self) -> str:
        text = self.flush()
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        self._shown = []
        return text

    def flush(self) -> str:
        """What is held back at the end: bytes that never became a character, as U+FFFD."""
        if not self._held:
            return ""
        before = self._decode(self._shown)
        held, self._held = self._decode(self._shown + self._held)[len(before) :], []
        return held

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
