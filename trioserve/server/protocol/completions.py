"""POST /v1/completions: the request, the response, the chunk."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from msgspec import UNSET, UnsetType

from trioserve.outputs import TokenLogprobs
from trioserve.server.protocol.sampling import SamplingFields
from trioserve.server.protocol.usage import Usage

__all__ = ["Completion", "CompletionChoice", "CompletionChunk", "CompletionLogprobs", "CompletionRequest"]

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


@attrs.frozen(kw_only=True)
class CompletionRequest(SamplingFields):
    """`max_tokens` may be 0 with `echo`: then the answer is the prompt."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    """The prompt comes back before the output, in logprobs too."""
    best_of: int | None = None
    """So many completions are drawn, and the `n` likeliest by token are the answer."""
    suffix: str | None = None
    """What comes after the completion. For models that were taught to fill in."""
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]  # structured: all texts, or all lists

    @property
    def num_sequences(self) -> int:
        """Searches run one after the other."""
        return self.num_drawn * (1 if self.use_beam_search else len(self.prompts))

    @property
    def num_drawn(self) -> int:
        """Completions of each prompt, of which `n` are shown."""
        return self.best_of or self.n or 1

    @property
    def chooses(self) -> bool:
        """More are drawn than are shown."""
        return self.num_drawn > (self.n or 1)

    @property
    def token_limit(self) -> int:
        """At least 1: the engine draws one, whatever is shown."""
        return _DEFAULT_MAX_TOKENS if self.max_tokens is None else max(self.max_tokens, 1)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Those of an echo are of the prompt, too."""
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs

    @property
    def field_names(self) -> dict[str, str]:
        if self.prompt_logprobs is not None:
            return super().field_names
        return super().field_names | {"prompt_logprobs": "logprobs"}


@attrs.define(kw_only=True)
class CompletionLogprobs:
    """Four columns, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for the prompt's first token, which nothing comes before."""
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens and the sampled one, so up to one more than were asked for."""
    text_offset: list[int]
    """Where the token starts, in characters from the start of the choice's text."""

    def followed_by(self, other: CompletionLogprobs) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=self.tokens + other.tokens,
            token_logprobs=self.token_logprobs + other.token_logprobs,
            top_logprobs=self.top_logprobs + other.top_logprobs,
            text_offset=self.text_offset + other.text_offset,
        )


@attrs.define(kw_only=True)
class CompletionChoice:
    """Of a response, and of a chunk (where `finish_reason` is null until the end)."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: Sequence[TokenLogprobs | None] | UnsetType = UNSET


@attrs.define(kw_only=True)
class Completion:
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: str | None = None
    system_fingerprint: str


@attrs.define(kw_only=True)
class CompletionChunk:
    """What `framing` writes of a stream, for those who are to read it."""

    id: str
    object: str
    created: int
    model: str
    service_tier: str | None
    system_fingerprint: str
    choices: list[CompletionChoice]
    """One, or none beside the usage at the end."""
    usage: Usage | UnsetType | None = UNSET
