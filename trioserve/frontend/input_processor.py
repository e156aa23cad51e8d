"""From what a user gives to what an engine takes, with everything checked that can be checked here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import attrs
import trio

from trioserve.audio_input import AudioInput
from trioserve.errors import InvalidRequestError, PromptTooLongError
from trioserve.frontend.adapters import Adapter
from trioserve.frontend.constraints import ConstraintsMaker
from trioserve.frontend.prompts import AudioPrompt, TextPrompt, parse_prompt
from trioserve.reasoning import find_reasoning_format
from trioserve.sampling_params import SamplingParams
from trioserve.text import is_unicode
from trioserve.validators import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.frontend.prompts import PromptType, Truncation
    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.token_constraints import TokenConstraints

__all__ = ["InputProcessor", "Routing", "TokenizedPrompt"]

T = TypeVar("T")
R = TypeVar("R")

_LONG_TEXT = 4_000
"""Characters from which tokenizing (more than a millisecond) leaves the event loop."""

_MAX_LOGPROBS = 2**24
"""Of one request, all in all: 192 MiB on their way here, and some GiB as Python objects."""

_MAX_CHARACTERS_PER_TOKEN = 128
"""No vocabulary has tokens that are longer on average: a text beyond that cannot fit, so it is not even
tokenized."""


@attrs.frozen(kw_only=True)
class Routing:
    """What goes to the engine beside prompt and parameters."""

    priority: int = 0
    """By the policy "priority", lower ones come first."""
    cache_salt: str | None = None
    """Prefix cache blocks are shared only among requests with the same salt."""
    adapter: Adapter | None = None

    def check(self) -> None:
        """
        Raises:
          InvalidRequestError: it cannot be sent.
        """
        priority, salt = self.priority, self.cache_salt
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
            raise InvalidRequestError(
                f"priority must be an integer of 64 bits, got {priority!r}.", parameter="priority"
            )
        if salt is not None and not (isinstance(salt, str) and is_unicode(salt)):
            raise InvalidRequestError(f"cache_salt must be a string, got {salt!r}.", parameter="cache_salt")

    def for_prompt(self, prompt: TokenizedPrompt) -> Routing:
        """The same, with the prompt's own salt where none is given here; checked.

        Raises as `check` does.
        """
        salt = prompt.cache_salt if self.cache_salt is None else self.cache_salt
        routing = attrs.evolve(self, cache_salt=salt)
        routing.check()
        return routing


@attrs.frozen(eq=False)
class TokenizedPrompt:
    text: str | None
    token_ids: Sequence[int]
    cache_salt: str | None = None
    audio: AudioInput | None = None


class InputProcessor:
    """Tokenizes prompts and checks them and their parameters against the limits of model and engine."""

    def __init__(self, config: EngineConfig, model: ResolvedModel, tokenizer: Tokenizer) -> None:
        self._model = model
        self._hears = "transcription" in model.tasks
        self._tokenizer = tokenizer
        self._constraints = ConstraintsMaker(
            tokenizer,
            find_reasoning_format(config.reasoning_parser, config.reasoning, tokenizer.chat_template),
        )
        self._max_logprobs = model.vocab_size if config.max_logprobs < 0 else config.max_logprobs
        # One at a time: tokenizing takes a core, and the engine needs the others.
        self._tokenizing = trio.CapacityLimiter(1)

    async def tokenize(self, prompt: PromptType) -> TokenizedPrompt:
        """The prompt's token ids. Short texts are done at once (no checkpoint), long ones in a thread, whose
        end a cancellation waits for.

        Raises:
          TypeError: it is no form of prompt.
          InvalidRequestError: it is empty, or longer than the model's context.
        """
        if isinstance(prompt, AudioPrompt):
            tokenized = await self._take_audio(prompt)
        else:
            tokenized = await self.tokenize_part(prompt)
        self.check_length(len(tokenized.token_ids))
        return tokenized

    async def _take_audio(self, prompt: AudioPrompt) -> TokenizedPrompt:
        parsed = parse_prompt(prompt)
        assert isinstance(parsed, AudioPrompt)
        if not self._hears:
            raise InvalidRequestError("This model takes text, and the prompt is audio.", parameter="prompt")
        self.check_vocabulary(parsed.token_ids)
        digest = await trio.to_thread.run_sync(_digest, parsed.samples, limiter=self._tokenizing)
        audio = AudioInput(digest=digest, samples=parsed.samples, search=parsed.search)
        return TokenizedPrompt(None, parsed.token_ids, parsed.cache_salt, audio)

    async def tokenize_part(self, prompt: PromptType, *, is_first: bool = True) -> TokenizedPrompt:
        """As `tokenize`, of a piece of a prompt: it may be empty, and only the first gets special tokens."""
        if isinstance(prompt, list) and len(prompt) >= self._model.max_model_len:
            self.check_length(len(prompt))  # before a look at each of what may be millions of token ids
        parsed = parse_prompt(prompt)
        if self._hears or isinstance(parsed, AudioPrompt):
            raise InvalidRequestError(
                "A speech model takes audio, whole: give an AudioPrompt, and no pieces.", parameter="prompt"
            )
        if isinstance(parsed, TextPrompt):
            if not is_first:
                parsed = attrs.evolve(parsed, add_special_tokens=False)
            tokenized = await self._tokenize_whole(parsed)
        else:
            tokenized = TokenizedPrompt(parsed.text, parsed.token_ids, parsed.cache_salt)
        self.check_vocabulary(tokenized.token_ids)
        return tokenized

    async def _tokenize_whole(self, prompt: TextPrompt) -> TokenizedPrompt:
        """The prompt, or what its truncation leaves of it."""
        token_ids = await self._encode(prompt)
        if prompt.truncation is None or len(token_ids) <= prompt.truncation.max_tokens:
            return TokenizedPrompt(prompt.text, token_ids, prompt.cache_salt)
        return TokenizedPrompt(None, prompt.truncation.of(token_ids), prompt.cache_salt)

    async def _encode(self, prompt: TextPrompt) -> list[int]:
        text = self.fit_text(prompt.text, prompt.truncation)
        if text is not prompt.text:
            prompt = attrs.evolve(prompt, text=text)
        return await self.in_thread_if_long(self._tokenize_text, prompt, num_characters=len(text))

    def fit_text(self, text: str, truncation: Truncation | None) -> str:
        """What is to be tokenized of a text: cut, if even that would be too much.

        Raises:
          InvalidRequestError: it is no text, or too long, and no truncation was asked for.
        """
        if not is_unicode(text):
            raise InvalidRequestError("The prompt has halves of characters.", parameter="prompt")
        most = self._model.max_model_len * _MAX_CHARACTERS_PER_TOKEN
        if len(text) <= most:
            return text
        if truncation is None:
            raise self.too_long(f"the prompt has {len(text)} characters")
        return truncation.of_text(text, most)

    async def in_thread_if_long(self, tokenize: Callable[[T], R], what: T, *, num_characters: int) -> R:
        """`tokenize(what)`: at once (no checkpoint), or of so many characters that it takes more than a
        millisecond in a thread, whose end a cancellation waits for."""
        if num_characters < _LONG_TEXT:
            return tokenize(what)
        return await trio.to_thread.run_sync(tokenize, what, limiter=self._tokenizing)

    def _tokenize_text(self, prompt: TextPrompt) -> list[int]:
        return self._tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)

    def check_length(self, length: int) -> None:
        """
        Raises:
          InvalidRequestError: a prompt of so many tokens is empty, or leaves no room for output.
        """
        if length == 0:
            raise InvalidRequestError("The prompt is empty.", parameter="prompt")
        if length >= self._model.max_model_len:
            raise self.too_long(f"the prompt has {length} tokens, which leaves no room for output")

    def too_long(self, found: str) -> PromptTooLongError:
        """`found`: how long, in words."""
        return PromptTooLongError(
            f"This model's maximum context length is {self._model.max_model_len} tokens, and {found}."
        )

    def check_vocabulary(self, token_ids: Sequence[int]) -> None:
        """
        Raises:
          InvalidRequestError: a token id is outside the vocabulary.
        """
        highest = max(token_ids, default=0)
        if highest >= self._model.vocab_size:
            raise InvalidRequestError(
                f"token ids must be below the vocabulary's size of {self._model.vocab_size}, "
                f"got {shown(highest)}.",
                parameter="prompt",
            )

    async def constraints(self, params: SamplingParams) -> TokenConstraints:
        """What of `params` has to be tokenized. A checkpoint only where there is much of it.

        Raises:
          InvalidRequestError: thinking_token_budget is set, and how the model thinks is not known.
        """
        if sum(map(len, params.bad_words)) < _LONG_TEXT:
            return self._constraints.make(params)
        return await trio.to_thread.run_sync(self._constraints.make, params, limiter=self._tokenizing)

    def fit_params(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        """`params` with max_tokens set (None: the model's own limit, or all the room there is), checked.

        Raises:
          InvalidRequestError: prompt and max_tokens together are more than the context holds, more logprobs
            are wanted than the engine allows or a request may have, or a token id is outside the vocabulary.
        """
        room = self._model.max_model_len - prompt_length
        self.check_room(params.max_tokens or 0, prompt_length)
        self._check_token_ids(params)
        for field in ("logprobs", "prompt_logprobs"):
            self._check_num_logprobs(field, getattr(params, field))
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens must be at most {room} after this prompt, got {params.min_tokens}.",
                parameter="min_tokens",
            )
        if params.max_tokens is None:
            limit = min(room, self._model.generation.max_new_tokens or room)
            params = attrs.evolve(params, max_tokens=limit)
        self._check_all_logprobs(params, prompt_length)
        return params

    def check_search(self, params: SamplingParams) -> None:
        """
        Raises:
          InvalidRequestError: `params` have what a beam search over audio cannot heed.
        """
        if params.temperature != 0:
            raise InvalidRequestError(
                f"temperature must be 0 for a beam search over audio, got {params.temperature}.",
                parameter="temperature",
            )
        for field in attrs.fields(SamplingParams):
            value, plain = getattr(params, field.name), getattr(_GREEDY, field.name)
            if field.name == "logprobs" and value == 0:
                continue
            if value != plain and field.name not in _FREE_IN_SEARCH:
                raise InvalidRequestError(
                    f"{field.name} must be {shown(plain)} for a beam search over audio, got {shown(value)}.",
                    parameter=field.name,
                )

    def check_room(self, max_tokens: int, prompt_length: int) -> None:
        """
        Raises:
          InvalidRequestError: prompt and `max_tokens` together are more than the context holds.
        """
        if prompt_length + max_tokens > self._model.max_model_len:
            raise self.too_long(
                f"{prompt_length} tokens of prompt and max_tokens={max_tokens} are "
                f"{prompt_length + max_tokens}"
            )

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def allows_all_logprobs(self) -> bool:
        """A request may ask for those of the whole vocabulary."""
        return self._max_logprobs >= self._model.vocab_size

    def _check_num_logprobs(self, field: str, number: int | None) -> None:
        if number is None or 0 <= number <= self._max_logprobs or (number < 0 and self.allows_all_logprobs):
            return
        raise InvalidRequestError(
            f"{field} must be at most {self._max_logprobs}, this engine's max_logprobs, got {number}"
            f"{' (all of the vocabulary)' if number < 0 else ''}.",
            parameter=field,
        )

    def _check_all_logprobs(self, params: SamplingParams, prompt_length: int) -> None:
        """They are kept until the request ends, so their number is limited, too."""
        num_tokens = {"logprobs": params.n * (params.max_tokens or 0), "prompt_logprobs": prompt_length}
        for field, count in num_tokens.items():
            wanted = getattr(params, field)
            per_token = 1 + (self._model.vocab_size if wanted == -1 else wanted or 0)
            if wanted is not None and count * per_token > _MAX_LOGPROBS:
                raise InvalidRequestError(
                    f"{field} of all tokens must be at most {_MAX_LOGPROBS}, got {count} tokens with "
                    f"{per_token} each: ask for fewer of them, or for fewer tokens.",
                    parameter=field,
                )

    def _check_token_ids(self, params: SamplingParams) -> None:
        for field in ("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            highest = max(getattr(params, field) or (), default=0)
            if highest >= self._model.vocab_size:
                raise InvalidRequestError(
                    f"{field} must name token ids below {self._model.vocab_size}, got {shown(highest)}.",
                    parameter=field,
                )


_GREEDY = SamplingParams(temperature=0)
_FREE_IN_SEARCH = {
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "detokenize", "skip_special_tokens",
    "skip_reading_prefix_cache", "extra_args", "output_kind", "flat_logprobs",
}  # fmt: skip
"""Fields of `SamplingParams` that may be set for a beam search over audio."""


def _digest(samples: bytes) -> str:
    """A millisecond or two, without the GIL."""
    return hashlib.sha256(samples).hexdigest()
