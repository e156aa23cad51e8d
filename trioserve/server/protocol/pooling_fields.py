"""The request fields that the routes of pooling share."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.frontend.prompts import Truncation
from trioserve.server.protocol.messages import ChatMessage

__all__ = ["EmbedDtype", "Endianness", "FormatFields", "InputFields", "PoolingFields", "PromptUsage"]

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]

Endianness = Literal["native", "little", "big"]


@attrs.frozen(kw_only=True)
class PoolingFields:
    """None always means "not given"."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    """A longer text is cut to so many tokens; -1: to as many as the model takes."""
    truncation_side: Literal["left", "right"] | None = None
    """Where it is cut; by default at the right: these models were trained on beginnings."""
    use_activation: bool | None = None
    """As in `trioserve.pooling_params.PoolingParams`."""
    priority: int | None = None
    request_id: str | None = None
    timeout: float | None = None
    """Seconds that the request may take, from its headers to its last byte."""

    def truncation(self, room: int) -> Truncation | None:
        """Of texts for a model that takes `room` tokens.

        Raises:
          InvalidRequestError: more tokens are to be kept than that.
        """
        wanted = self.truncate_prompt_tokens
        if wanted is None:
            return None
        if wanted > room:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be at most {room}, what this model takes, got {wanted}.",
                parameter="truncate_prompt_tokens",
            )
        return Truncation(room if wanted == -1 else wanted, keeps_end=self.truncation_side == "left")


@attrs.frozen(kw_only=True)
class InputFields(PoolingFields):
    """Texts (`input`), or conversations (`messages`), each of which a chat template makes a text of."""

    input: str | list[str] | list[int] | list[list[int]] | None = None
    """Token ids are taken as they are."""
    messages: list[ChatMessage] | list[list[ChatMessage]] | None = None
    add_special_tokens: bool | None = None
    """None: to texts yes, to conversations no, as the chat template adds them."""
    add_generation_prompt: bool | None = None
    """None: no, as nothing is generated."""
    continue_final_message: bool | None = None
    chat_template: str | None = None
    """Instead of the model's; only where the server trusts its clients with that."""
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def texts(self) -> list[str] | list[list[int]]:
        """What `input` holds, one entry per text."""
        if isinstance(self.input, str):
            return [self.input]
        if self.input and isinstance(self.input[0], int):
            return [self.input]
        return self.input or []  # type: ignore[return-value]  # structured: all texts, or all lists

    @property
    def conversations(self) -> list[list[ChatMessage]]:
        """What `messages` holds."""
        if self.messages and isinstance(self.messages[0], ChatMessage):
            return [self.messages]  # structured: all messages, or all lists of them
        return self.messages or []  # type: ignore[return-value]  # the same

    @property
    def num_inputs(self) -> int:
        return len(self.conversations if self.messages is not None else self.texts)

    @property
    def source(self) -> Literal["input", "messages"]:
        """The field that holds the inputs."""
        return "input" if self.messages is None else "messages"


@attrs.frozen(kw_only=True)
class FormatFields(InputFields):
    """And how the numbers that come of them are written."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    """bytes: the body is all numbers one after the other, and the header `metadata` says whose are where;
    bytes_only: without that header. None: float."""
    embed_dtype: EmbedDtype | None = None
    """Of all formats but float; None: float32."""
    endianness: Endianness | None = None
    """The same; None: the server's own."""

    @property
    def is_binary(self) -> bool:
        """The body is no JSON."""
        return self.encoding_format in {"bytes", "bytes_only"}


@attrs.frozen
class PromptUsage:
    """Tokens of a request that generates nothing."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt_tokens: int) -> PromptUsage:
        return cls(prompt_tokens, prompt_tokens)
