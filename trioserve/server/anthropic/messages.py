"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from quart import g, request

from trioserve.reasoning import find_reasoning_format
from trioserve.server.anthropic.answers import whole_message
from trioserve.server.anthropic.chat_request import chat_request
from trioserve.server.anthropic.events import MessageEvents
from trioserve.server.error_envelopes import is_anthropic
from trioserve.server.errors import naming
from trioserve.server.protocol.anthropic_answers import TokenCount
from trioserve.server.protocol.anthropic_readers import COUNT_TOKENS_READER, MESSAGES_READER
from trioserve.server.replies import json_reply
from trioserve.server.request_scope import limit_request, request_stack
from trioserve.server.streaming import start_stream
from trioserve.server.tokenizing import TextEncoder
from trioserve.server.turns import Turns
from trioserve.server.usage import UsageCounter

if TYPE_CHECKING:
    from quart import Quart, Response

    from trioserve.server.framing import ReplyHead
    from trioserve.server.protocol.anthropic import ConversationRequest, MessagesRequest
    from trioserve.server.protocol.chat import ChatCompletionRequest

__all__ = ["Messages", "name_requests"]


@attrs.frozen(eq=False)
class Messages:
    """The handlers. A message is a turn of a chat, told in Anthropic's way."""

    _turns: Turns
    _encoder: TextEncoder
    _knows_thinking: bool = attrs.field(init=False)
    """How the model thinks is known, and so where a budget of it ends."""

    @_knows_thinking.default
    def _find_reasoning(self) -> bool:
        llm = self._turns.service.llm
        config, template = llm.config, llm.tokenizer.chat_template
        return find_reasoning_format(config.reasoning_parser, config.reasoning, template) is not None

    async def create(self) -> Response:
        service = self._turns.service
        request = await service.read_request(MESSAGES_READER)
        limit_request(request.timeout)
        service.check_model(request.model)
        head = service.reply_head("msg", None, request.model)
        with naming(request.field_names):
            return await self._answer(request, head)

    async def count_tokens(self) -> Response:
        service = self._turns.service
        request = await service.read_request(COUNT_TOKENS_READER)
        limit_request(request.timeout)
        service.check_model(request.model)
        head = service.reply_head("msg", None, request.model)
        with naming(request.field_names):
            plan = await self._turns.plan(self._chat(request), head.id)
            (prompt,) = plan.generation.prompts
            token_ids = await self._encoder.encode_prompt(prompt)
        return json_reply(TokenCount(len(token_ids)))

    def _chat(self, request: ConversationRequest) -> ChatCompletionRequest:
        return chat_request(
            request,
            limits_thinking=self._knows_thinking,
            thinks_by_default="enable_thinking" in self._turns.template_defaults,
        )

    async def _answer(self, request: MessagesRequest, head: ReplyHead) -> Response:
        turn = await self._turns.open(self._chat(request), head.id, request_stack())
        (reader,) = turn.readers
        shows_thinking = request.thinking is None or request.thinking.display != "omitted"
        if request.stream:
            writer = MessageEvents(head, g.request_id, reader, shows_thinking=shows_thinking)
            return await start_stream(turn.outputs, writer, num_prompts=1, field_names=request.field_names)
        _, output = await turn.outputs.next()
        return json_reply(whole_message(head, output, reader, UsageCounter(), shows_thinking=shows_thinking))


def name_requests(app: Quart) -> None:
    """Say a request's id in the header, too, that clients of Anthropic's API look at."""

    async def after(response: Response) -> Response:
        if is_anthropic(request.path):
            response.headers["Request-Id"] = g.request_id
        return response

    app.after_request(after)
