"""Token ids of texts for which nothing is generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.async_llm import AsyncLLM
from trioserve.errors import InvalidRequestError
from trioserve.frontend.prompts import TextPrompt, TokensPrompt
from trioserve.text import is_unicode

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TextEncoder"]

_LONG_TEXT = 4_000
"""Characters from which tokenizing (more than a millisecond) leaves the event loop."""


@attrs.frozen(eq=False)
class TextEncoder:
    """Tokenizes without a look at the model's context: also what is too long has a length."""

    _llm: AsyncLLM
    # One at a time, and not that of the engine's requests, which need not wait for this.
    _limiter: trio.CapacityLimiter = attrs.field(init=False, factory=lambda: trio.CapacityLimiter(1))

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Short texts are done at once (no checkpoint), long ones in a thread, whose end a cancellation waits
        for: a second per 2.5 million characters.

        Raises:
          InvalidRequestError: it has halves of characters.
        """
        if not is_unicode(text):
            raise InvalidRequestError("The prompt has halves of characters.", parameter="prompt")
        if len(text) < _LONG_TEXT:
            return self._encode(text, add_special_tokens)
        return await trio.to_thread.run_sync(self._encode, text, add_special_tokens, limiter=self._limiter)

    async def encode_prompt(self, prompt: str | list[int] | TextPrompt | TokensPrompt) -> Sequence[int]:
        """As `encode`, of whatever is a prompt."""
        match prompt:
            case TextPrompt():
                token_ids = await self.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
                return token_ids if prompt.truncation is None else prompt.truncation.of(token_ids)
            case TokensPrompt():
                return prompt.token_ids
            case str():
                return await self.encode(prompt, add_special_tokens=True)
            case _:
                return prompt

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._llm.tokenizer.encode(text, add_special_tokens=add_special_tokens)
