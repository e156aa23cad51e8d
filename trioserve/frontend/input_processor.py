"""From what a user gives to what an engine takes, with everything checked that can be checked here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.errors import InvalidRequestError, PromptTooLongError
from trioserve.frontend.prompts import TextPrompt, parse_prompt
from trioserve.text import is_unicode

if TYPE_CHECKING:
    from trioserve.config import ResolvedModel
    from trioserve.frontend.prompts import PromptType
    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.sampling_params import SamplingParams

__all__ = ["InputProcessor", "TokenizedPrompt"]

_LONG_TEXT = 4_000
"""Characters from which tokenizing (more than a millisecond) leaves the event loop."""

_MAX_CHARACTERS_PER_TOKEN = 128
"""No vocabulary has tokens that are longer on average: a text beyond that cannot fit, so it is not even
tokenized."""


def check_routing(priority: int, cache_salt: str | None) -> None:
    """What goes to the engine beside prompt and parameters.

    Raises:
      InvalidRequestError: it cannot be sent.
    """
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
        raise InvalidRequestError(
            f"priority must be an integer of 64 bits, got {priority!r}.", parameter="priority"
        )
    if cache_salt is not None and not (isinstance(cache_salt, str) and is_unicode(cache_salt)):
        raise InvalidRequestError(f"cache_salt must be a string, got {cache_salt!r}.", parameter="cache_salt")


@attrs.frozen(eq=False)
class TokenizedPrompt:
    text: str | None
    token_ids: Sequence[int]


class InputProcessor:
    """Tokenizes prompts and checks them and their parameters against the model's limits."""

    def __init__(self, model: ResolvedModel, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer
        # One at a time: tokenizing takes a core, and the engine needs the others.
        self._tokenizing = trio.CapacityLimiter(1)

    async def tokenize(self, prompt: PromptType) -> TokenizedPrompt:
        """The prompt's token ids. Short texts are done at once (no checkpoint), long ones in a thread, whose
        end a cancellation waits for.

        Raises:
          TypeError: it is no form of prompt.
          InvalidRequestError: it is empty, or longer than the model's context.
        """
        parsed = parse_prompt(prompt)
        if isinstance(parsed, TextPrompt):
            tokenized = TokenizedPrompt(parsed.text, await self._encode(parsed))
        else:
            tokenized = TokenizedPrompt(parsed.text, parsed.token_ids)
        self._check_length(len(tokenized.token_ids))
        self._check_vocabulary(tokenized.token_ids)
        return tokenized

    async def _encode(self, prompt: TextPrompt) -> list[int]:
        if not is_unicode(prompt.text):
            raise InvalidRequestError("The prompt has halves of characters.", parameter="prompt")
        size = len(prompt.text)
        if size > self._model.max_model_len * _MAX_CHARACTERS_PER_TOKEN:
            raise self._too_long(f"the prompt has {size} characters")
        if size < _LONG_TEXT:
            return self._tokenize_text(prompt)
        return await trio.to_thread.run_sync(self._tokenize_text, prompt, limiter=self._tokenizing)

    def _tokenize_text(self, prompt: TextPrompt) -> list[int]:
        return self._tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)

    def _check_length(self, length: int) -> None:
        if length == 0:
            raise InvalidRequestError("The prompt is empty.", parameter="prompt")
        if length >= self._model.max_model_len:
            raise self._too_long(f"the prompt has {length} tokens, which leaves no room for output")

    def _too_long(self, found: str) -> PromptTooLongError:
        return PromptTooLongError(
            f"This model's maximum context length is {self._model.max_model_len} tokens, and {found}."
        )

    def _check_vocabulary(self, token_ids: Sequence[int]) -> None:
        highest = max(token_ids)
        if highest >= self._model.vocab_size:
            raise InvalidRequestError(
                f"token ids must be below the vocabulary's size of {self._model.vocab_size}, got {highest}.",
                parameter="prompt",
            )

    def fit_params(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        """`params` with max_tokens set (None: the model's own limit, or all the room there is), checked.

        Raises:
          InvalidRequestError: prompt and max_tokens together are more than the context holds, or a token id
            is outside the vocabulary.
        """
        room = self._model.max_model_len - prompt_length
        if params.max_tokens is not None and params.max_tokens > room:
            raise self._too_long(
                f"{prompt_length} tokens of prompt and max_tokens={params.max_tokens} are "
                f"{prompt_length + params.max_tokens}"
            )
        for field, token_ids in (
            ("logit_bias", params.logit_bias or ()),
            ("stop_token_ids", params.stop_token_ids),
        ):
            self._check_own_tokens(field, token_ids)
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens must be at most {room} after this prompt, got {params.min_tokens}.",
                parameter="min_tokens",
            )
        if params.max_tokens is not None:
            return params
        return attrs.evolve(params, max_tokens=min(room, self._model.generation.max_new_tokens or room))

    def _check_own_tokens(self, field: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self._model.vocab_size:
                raise InvalidRequestError(
                    f"{field} must name token ids below {self._model.vocab_size}, got {token_id}.",
                    parameter=field,
                )
