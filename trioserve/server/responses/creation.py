"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from trioserve.sampling_params import SamplingParams
from trioserve.server.auth import client_of_request
from trioserve.server.errors import naming
from trioserve.server.generation import Outputs
from trioserve.server.protocol.responses import InputTokenCount
from trioserve.server.protocol.responses_reader import RESPONSES_READER, TOKEN_COUNT_READER
from trioserve.server.replies import json_reply
from trioserve.server.request_scope import (
    App,
    limit_request,
    request_deadline,
    request_stack,
    time_limits,
)
from trioserve.server.responses.background import BackgroundRun
from trioserve.server.responses.chat_request import chat_request, field_names
from trioserve.server.responses.context import ContextReader
from trioserve.server.responses.conversation import chat_messages, stored_items
from trioserve.server.responses.home import ResponsesHome
from trioserve.server.responses.ids import new_response_id
from trioserve.server.responses.keeping import Keeper
from trioserve.server.responses.new_response import new_response
from trioserve.server.responses.refusals import not_served
from trioserve.server.responses.stream import KeptStream, keep_if_possible
from trioserve.server.responses.truncation import count_tokens, truncate
from trioserve.server.responses.writer import ResponseWriter
from trioserve.server.sse import sse_response
from trioserve.server.streaming import EventStream
from trioserve.server.tokenizing import TextEncoder
from trioserve.server.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quart import Response

    from trioserve.server.framing import ReplyHead
    from trioserve.server.protocol.chat import ChatCompletionRequest
    from trioserve.server.protocol.responses_items import InputItem
    from trioserve.server.protocol.responses_request import PromptFields, ResponsesRequest
    from trioserve.server.responses.background import Background

__all__ = ["ResponseCreation"]


@attrs.frozen(kw_only=True)
class _Begun:
    """A response whose turn has been submitted."""

    outputs: Outputs
    writer: ResponseWriter
    keeper: Keeper | None
    field_names: Mapping[str, str]


@attrs.frozen(eq=False)
class ResponseCreation:
    """The handlers of what costs the engine work.

    A response that its client waits for ends with the request, whatever ends that, and is stored if it has
    come to its end. One in the background takes over what the request owns: its work in the engine, and its
    place at the door.
    """

    _app: App
    _turns: Turns
    _home: ResponsesHome
    _encoder: TextEncoder

    async def create(self) -> Response:
        service = self._turns.service
        request = await service.read_request(RESPONSES_READER)
        limit_request(request.timeout)
        service.check_model(request.model)
        head = service.reply_head("resp", request.request_id, request.model)
        background = self._background_for(request)
        with naming(field_names(request)):
            begun = await self._begin(request, head)
            if background is not None:
                return await self._leave_to(background, begun, streams=bool(request.stream))
            return await self._wait_for(begun, streams=bool(request.stream))

    async def count(self) -> Response:
        """POST /v1/responses/input_tokens."""
        request = await self._turns.service.read_request(TOKEN_COUNT_READER)
        self._turns.service.check_model(request.model)
        with naming(field_names(request)):
            chat = await self._chat(request, await self._own_items(request))
            return json_reply(InputTokenCount(await count_tokens(chat, self._turns, self._encoder)))

    def _background_for(self, request: ResponsesRequest) -> Background | None:
        """Where the response is to be made; None: here, while its client waits.

        Raises:
          ApiError: there is no background here (400), or it is closing (503).
          OverloadedError: it is full.
        """
        if not request.background:
            return None
        if self._home.store is None:
            raise not_served("background", "this server keeps no responses")
        if self._home.background is None:
            raise not_served("background", "this application is served without a background")
        self._home.background.check_room()
        return self._home.background

    async def _begin(self, request: ResponsesRequest, head: ReplyHead) -> _Begun:
        response_id = new_response_id()
        items = await self._own_items(request)
        chat = await self._chat(request, items)
        turn = await self._turns.open(chat, response_id, request_stack())
        params = turn.plan.generation.params
        assert isinstance(params, SamplingParams), "there is no beam search in this API"
        is_stored = request.store is not False and self._home.store is not None
        response = new_response(request, response_id, head, params, is_stored=is_stored)
        tokenizer = self._turns.service.llm.tokenizer
        return _Begun(
            outputs=turn.outputs,
            writer=ResponseWriter(response, turn.readers[0], tokenizer, request.num_top_logprobs),
            keeper=self._keeper(request, response_id, items) if is_stored else None,
            field_names=field_names(request),
        )

    def _context(self) -> ContextReader:
        return ContextReader(self._home.store, client_of_request())

    async def _own_items(self, request: PromptFields) -> list[InputItem]:
        return await self._context().resolve(request.items)

    async def _chat(self, request: PromptFields, items: Sequence[InputItem]) -> ChatCompletionRequest:
        """What is to be generated from `items` and all that was before."""
        history = await self._context().history(request.previous_response_id)
        messages = chat_messages([*history, *items], request.instructions)
        # Outputs come as they are made, also to whom nothing is streamed: an end by time or by the server's
        # own end leaves what has come until then.
        streams = bool(getattr(request, "stream", None) or getattr(request, "background", None))
        chat = chat_request(request, messages, streams=streams)
        if request.truncation == "auto":
            return await truncate(chat, self._turns, self._encoder)
        return chat

    def _keeper(self, request: ResponsesRequest, response_id: str, items: Sequence[InputItem]) -> Keeper:
        assert self._home.store is not None
        stored = stored_items(items, response_id)
        return Keeper(
            self._home.store, client_of_request(), response_id, request.previous_response_id, stored
        )

    async def _wait_for(self, begun: _Begun, *, streams: bool) -> Response:
        writer = begun.writer
        if streams:
            events = EventStream(
                begun.outputs, writer, request_deadline(), num_prompts=1, field_names=begun.field_names
            )
            await events.start(time_limits().keep_alive_interval)
            return sse_response(KeptStream(events, writer, begun.keeper))
        _, output = await begun.outputs.next()
        writer.advance(output)
        writer.finish()
        await keep_if_possible(begun.keeper, writer)
        return json_reply(writer.response)

    async def _leave_to(self, background: Background, begun: _Begun, *, streams: bool) -> Response:
        """The response goes on by itself, and its request is answered at once."""
        keeper, deadline = begun.keeper, request_deadline()
        assert keeper is not None, "the reader has seen to it"
        background.check_room()  # others may have begun meanwhile
        run = BackgroundRun(
            app=self._app,
            writer=begun.writer,
            outputs=begun.outputs,
            keeper=keeper,
            deadline=deadline.fork(),
            resources=request_stack().pop_all(),
            field_names=begun.field_names,
        )
        run.log.append(begun.writer.announce())
        answer = sse_response(run.log.follow(-1)) if streams else json_reply(begun.writer.response)
        background.start(run)
        await run.has_begun.wait()
        if streams:
            await deadline.lift()  # the response has its own, and its end is the stream's
        return answer
