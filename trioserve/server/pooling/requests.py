"""What the handlers of pooling have in common: from a body to a request, and from its texts to results."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

import attrs
import trio

from trioserve.errors import InvalidRequestError
from trioserve.frontend.prompts import TextPrompt
from trioserve.server.pooling.naming import naming_prompts
from trioserve.server.request_scope import limit_request
from trioserve.server.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.async_llm import AsyncLLM
    from trioserve.outputs import PoolingRequestOutput
    from trioserve.pooling_params import PoolingParams
    from trioserve.server.framing import ReplyHead
    from trioserve.server.protocol.cohere import CohereEmbedRequest
    from trioserve.server.protocol.messages import ChatMessage
    from trioserve.server.protocol.pooling_fields import InputFields, PoolingFields
    from trioserve.server.protocol.reading import RequestReader

__all__ = ["PoolingRequests"]

R = TypeVar("R", bound="PoolingFields | CohereEmbedRequest")

Prompts = list[TextPrompt | list[int]]


@attrs.frozen(eq=False)
class PoolingRequests:
    """Reads requests and has them pooled. The engine's work ends with the scope of the HTTP request, whatever
    ends that."""

    turns: Turns
    """For chat templates."""
    # One at a time: it takes a core.
    _cutting: trio.CapacityLimiter = attrs.field(init=False, factory=lambda: trio.CapacityLimiter(1))

    @property
    def llm(self) -> AsyncLLM:
        return self.turns.service.llm

    async def receive(self, reader: RequestReader[R], prefix: str) -> tuple[R, ReplyHead]:
        """The request at hand, and the head of its reply, whose id begins with `prefix`.

        Raises as `Service.read_request` and `Service.check_model` do; InvalidRequestError also for adapters.
        """
        service = self.turns.service
        request = await service.read_request(reader)
        limit_request(request.timeout)
        if service.check_model(request.model) is not None:
            raise InvalidRequestError(
                f"{request.model} is an adapter, with which nothing is pooled.", parameter="model"
            )
        return request, service.reply_head(prefix, request.request_id, request.model)

    async def pool(
        self, request: InputFields, params: PoolingParams, head: ReplyHead
    ) -> list[PoolingRequestOutput]:
        """One result per input, in their order.

        Raises:
          InvalidRequestError: an input or a parameter is nothing for this model; no input is computed then.
          OverloadedError: too many wait.
          EngineDeadError, ClosedError: there is no engine.
        """
        self.llm.check_room(request.num_inputs)
        with naming_prompts(request.source):
            prompts = await self._prompts(request)
            return await self.llm.encode_many(
                prompts, params, request_id=head.id, priority=request.priority or 0
            )

    async def beginnings(self, texts: Sequence[str], max_tokens: int | None) -> Sequence[str]:
        """Of each text at most so many tokens, without special ones; None and 0: all of it. Cut in a thread,
        whose end a cancellation waits for."""
        if not max_tokens:
            return texts
        cut = partial(self.llm.tokenizer.beginnings, texts, max_tokens)
        return await trio.to_thread.run_sync(cut, limiter=self._cutting)

    async def _prompts(self, request: InputFields) -> Prompts:
        truncation = request.truncation(self.llm.model.max_model_len)
        if request.messages is not None:
            return [
                attrs.evolve(
                    await self._render(conversation, request),
                    add_special_tokens=bool(request.add_special_tokens),
                    truncation=truncation,
                )
                for conversation in request.conversations
            ]
        adds_special_tokens = request.add_special_tokens is not False
        return [
            TextPrompt(text, adds_special_tokens, truncation=truncation)
            if isinstance(text, str)
            else text
            if truncation is None
            else truncation.of(text)
            for text in request.texts
        ]

    async def _render(self, conversation: Sequence[ChatMessage], request: InputFields) -> TextPrompt:
        return await self.llm.render_chat(
            [message.for_template() for message in conversation],
            add_generation_prompt=bool(request.add_generation_prompt),
            continue_final_message=bool(request.continue_final_message),
            template_kwargs={**self.turns.template_defaults, **(request.chat_template_kwargs or {})},
            chat_template=self.turns.foreign_template(request.chat_template),
        )
