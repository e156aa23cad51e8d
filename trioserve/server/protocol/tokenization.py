"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.server.protocol.chat import ChatCompletionRequest
from trioserve.server.protocol.messages import ChatMessage
from trioserve.server.protocol.readers import CHAT_READER
from trioserve.server.protocol.reading import Problem, RequestReader
from trioserve.server.protocol.tools import FunctionTool

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DETOKENIZE_READER",
    "TOKENIZE_READER",
    "DetokenizeRequest",
    "Detokenized",
    "TokenizeRequest",
    "Tokenized",
]


@attrs.frozen(kw_only=True)
class TokenizeRequest:
    """A text (`prompt`), or a conversation (`messages`), which is rendered as a chat completion's."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """None: with a text yes, with a conversation no, as the chat template adds them."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[FunctionTool] | None = None

    def chat(self) -> ChatCompletionRequest:
        """The chat completion whose prompt is meant."""
        return ChatCompletionRequest(
            messages=self.messages or [],
            add_special_tokens=self.add_special_tokens,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=self.tools,
        )


@attrs.frozen(kw_only=True)
class Tokenized:
    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: list[str] | None
    """As the vocabulary spells them."""


@attrs.frozen(kw_only=True)
class DetokenizeRequest:
    tokens: list[int]
    model: str | None = None


@attrs.frozen
class Detokenized:
    prompt: str
    """With special tokens."""


_CHAT_ONLY = (
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools",
)  # fmt: skip


def _tokenize_conflicts(request: TokenizeRequest) -> list[Problem]:
    if (request.prompt is None) == (request.messages is None):
        return [Problem("prompt", "Exactly one of prompt and messages must be given.")]
    if request.messages is not None:
        return CHAT_READER.conflicts(request.chat())
    return [
        Problem(name, f"{name} is only allowed with messages.")
        for name in _CHAT_ONLY
        if getattr(request, name) is not None
    ]


def _oversized(values: Mapping[str, Any]) -> list[Problem]:
    return CHAT_READER.oversized(values)


def _detokenize_conflicts(_: DetokenizeRequest) -> list[Problem]:
    return []


TOKENIZE_READER = RequestReader(
    kind=TokenizeRequest,
    ranges={},
    refusals=(),
    shapes={name: CHAT_READER.shapes[name] for name in ("messages", "tools")},
    oversized=_oversized,
    conflicts=_tokenize_conflicts,
)

DETOKENIZE_READER = RequestReader(
    kind=DetokenizeRequest, ranges={}, refusals=(), conflicts=_detokenize_conflicts
)
