"""What is asked about responses that there are already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import msgspec
from quart import Response, request
from werkzeug.exceptions import NotFound

from trioserve.errors import InvalidRequestError
from trioserve.server.auth import client_of_request
from trioserve.server.protocol.responses import DeletedResponse
from trioserve.server.replies import json_reply
from trioserve.server.request_scope import request_deadline
from trioserve.server.responses.event_log import EventLog
from trioserve.server.responses.home import ResponsesHome
from trioserve.server.responses.queries import ListQuery, RetrieveQuery
from trioserve.server.responses.refusals import events_not_kept, not_background, response_not_found
from trioserve.server.sse import sse_response
from trioserve.validators import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.server.responses.background import BackgroundRun
    from trioserve.server.responses.store import StoredResponse

__all__ = ["ResponseRoutes"]


@attrs.frozen
class _Stored:
    """Of a stored response: what decides what may be asked of it."""

    background: bool


@attrs.frozen
class _Item:
    id: str


_decode_response = msgspec.json.Decoder(_Stored).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_item = msgspec.json.Decoder(_Item).decode
_encode = msgspec.json.Encoder().encode


@attrs.frozen(eq=False)
class ResponseRoutes:
    """The handlers. Each raises ApiError (404) for what is not there, or is somebody else's."""

    _home: ResponsesHome

    async def retrieve(self, response_id: str) -> Response:
        """GET /v1/responses/{id}: as far as it has come; or its events, past and to come."""
        query = RetrieveQuery.of(request.args)
        run = self._find_run(response_id)
        if query.streams:
            log = await self._log(response_id) if run is None else run.log
            follower = log.follow(query.starting_after)
            await request_deadline().lift()  # the response has its own, and its end is the stream's
            return sse_response(follower)
        if run is None:
            return _json((await self._stored(response_id)).response)
        if run.writer.has_ended:  # who has seen that it has ended can go on from it
            await run.ended.wait()
        return json_reply(run.writer.response)

    async def delete(self, response_id: str) -> Response:
        """DELETE /v1/responses/{id}. One that is being made ends."""
        run = self._find_run(response_id)
        if run is not None:
            run.discard()
            await run.ended.wait()
        store = self._home.store
        was_there = store is not None and await store.delete(client_of_request(), response_id)
        if not was_there and run is None:
            raise response_not_found(response_id)
        return json_reply(DeletedResponse(response_id))

    async def cancel(self, response_id: str) -> Response:
        """POST /v1/responses/{id}/cancel: ends one of the background. One that has ended stays as it is."""
        run = self._find_run(response_id)
        if run is not None:
            run.cancel()
            await run.ended.wait()
            return json_reply(run.writer.response)
        stored = await self._stored(response_id)
        if not _decode_response(stored.response).background:
            raise not_background(response_id, "cancelled")
        return _json(stored.response)

    async def list_items(self, response_id: str) -> Response:
        """GET /v1/responses/{id}/input_items: a page of the input, by default the last item first."""
        query = ListQuery.of(request.args)
        run = self._find_run(response_id)
        items = (await self._stored(response_id)).items if run is None else _encode(run.keeper.items)
        return json_reply(_page(_decode_items(items), query))

    async def compact(self) -> Response:
        """POST /v1/responses/compact, which is not served; without this, it would be a response's id."""
        raise NotFound

    def _find_run(self, response_id: str) -> BackgroundRun | None:
        background = self._home.background
        return None if background is None else background.find(client_of_request(), response_id)

    async def _stored(self, response_id: str) -> StoredResponse:
        store = self._home.store
        stored = None if store is None else await store.get(client_of_request(), response_id)
        if stored is None:
            raise response_not_found(response_id)
        return stored

    async def _log(self, response_id: str) -> EventLog:
        stored = await self._stored(response_id)
        if not _decode_response(stored.response).background:
            raise not_background(response_id, "streamed again")
        if not stored.events:
            raise events_not_kept(response_id)
        return EventLog.of_stored(stored.events, stored.first_event)


def _json(text: bytes) -> Response:
    return Response(text, content_type="application/json")


def _page(items: Sequence[msgspec.Raw], query: ListQuery) -> dict[str, object]:
    """An `InputItemList`, of items that are JSON already."""
    ids = [_decode_item(item).id for item in items]
    numbered = list(zip(ids, items, strict=True))
    if query.is_descending:
        numbered.reverse()
    if query.after is not None:
        if query.after not in ids:
            raise InvalidRequestError(
                f"after must be the id of an item of this list, got {shown(query.after)}.", parameter="after"
            )
        numbered = numbered[[item_id for item_id, _ in numbered].index(query.after) + 1 :]
    page = numbered[: query.limit]
    return {
        "object": "list",
        "data": [item for _, item in page],
        "first_id": page[0][0] if page else "",
        "last_id": page[-1][0] if page else "",
        "has_more": len(numbered) > len(page),
    }
