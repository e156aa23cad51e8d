"""POST /v1/chat/completions/batch: vLLM's route for several conversations at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.server.chat_answers import ChatAnswer
from trioserve.server.errors import naming
from trioserve.server.protocol.readers import CHAT_BATCH_READER
from trioserve.server.replies import json_reply
from trioserve.server.request_scope import limit_request, request_stack
from trioserve.server.turns import Turns

if TYPE_CHECKING:
    from quart import Response

    from trioserve.server.framing import ReplyHead
    from trioserve.server.protocol.chat import ChatBatchRequest, ChatCompletion

__all__ = ["ChatBatches"]


@attrs.frozen(eq=False)
class ChatBatches:
    """The handler. Every conversation is a request of the engine's, `<id>-<index>`; if one of them fails, so
    does the whole, and the engine's work ends with the request's scope, whatever ends that."""

    _turns: Turns

    async def create(self) -> Response:
        service = self._turns.service
        request = service.reply_defaults.complete(await service.read_request(CHAT_BATCH_READER))
        limit_request(request.timeout)
        service.check_model(request.model)
        head = service.reply_head("chatcmpl", request.request_id, request.model)
        if request.service_tier is not None:
            head = attrs.evolve(head, service_tier="default")
        with naming(request.field_names):
            return json_reply(await self._answer(request, head))

    async def _answer(self, batch: ChatBatchRequest, head: ReplyHead) -> ChatCompletion:
        requests = batch.requests()
        llm = self._turns.service.llm
        llm.check_room(len(requests))
        turns = [
            await self._turns.open(request, f"{head.id}-{index}", request_stack())
            for index, request in enumerate(requests)
        ]
        answer = ChatAnswer(head, llm.tokenizer)
        for request, turn in zip(requests, turns, strict=True):
            _, output = await turn.outputs.next()
            answer.add(request, output, turn.readers)
        return answer.reply(batch)
