"""What the handlers of all APIs share: the engine, its names, and the identity of a reply."""

from __future__ import annotations

import hashlib
import time
import uuid
from typing import TYPE_CHECKING, TypeVar

import attrs
import trio
from quart import Response, current_app, g, request
from werkzeug.exceptions import RequestEntityTooLarge

from trioserve.async_llm import AsyncLLM
from trioserve.errors import InvalidRequestError
from trioserve.server.current_request import current_request
from trioserve.server.errors import (
    body_too_large,
    model_not_found,
    unsupported_content_encoding,
    unsupported_content_type,
)
from trioserve.server.framing import ReplyHead
from trioserve.server.protocol.json_depth import check_json_depth
from trioserve.server.reply_defaults import ReplyDefaults
from trioserve.server.request_ids import MAX_REQUEST_ID, is_request_id
from trioserve.version import __version__

if TYPE_CHECKING:
    from quart import Quart
    from quart.typing import ResponseTypes

    from trioserve.server.protocol.reading import RequestReader
    from trioserve.tasks import Task

__all__ = ["Service", "identify_requests"]

T = TypeVar("T")

_REQUEST_ID_HEADER = "X-Request-Id"

_LARGE_BODY = 2**18
"""Bytes; smaller ones are read in less than 50 ms, whatever they are made of."""


@attrs.frozen(kw_only=True, eq=False)
class Service:
    """One engine behind the HTTP routes."""

    llm: AsyncLLM
    model_names: tuple[str, ...]
    """All that clients may use; the first is the one that answers carry."""
    started: int
    """Unix time."""
    system_fingerprint: str
    """Stands for everything that decides what a seed gives."""
    reply_defaults: ReplyDefaults = attrs.field(factory=ReplyDefaults)
    # One at a time: reading takes a core, and may take a hundred times the body's size of memory.
    _reading: trio.CapacityLimiter = attrs.field(init=False, factory=lambda: trio.CapacityLimiter(1))

    @classmethod
    def for_llm(cls, llm: AsyncLLM, reply_defaults: ReplyDefaults) -> Service:
        config = llm.config
        deciding = (config.scheduler, config.cache, config.threads, config.logits_processors, llm.model)
        return cls(
            llm=llm,
            model_names=llm.config.model.served_model_names,
            started=int(time.time()),
            system_fingerprint=f"trioserve-{__version__}-{hashlib.sha256(repr(deciding).encode()).hexdigest()[:8]}",
            reply_defaults=reply_defaults,
        )

    def has_task(self, *tasks: Task) -> bool:
        """The model can be asked for one of these."""
        return not set(tasks).isdisjoint(self.llm.model.tasks)

    async def read_request(self, reader: RequestReader[T]) -> T:
        """The request at hand, from its body. A large one is read in a thread, whose end a cancellation waits
        for: it may take seconds, in which the streams of others go on.

        Raises:
          ApiError: the body is not declared as JSON (400), is encoded (415) or too large (413).
          RequestTimeout: it did not come in the application's BODY_TIMEOUT (408).
          InvalidRequestError: it is nested deeper than the application's MAX_JSON_DEPTH, or is no such
            request.
        """
        body = await _receive_json(keeps=False)
        max_depth = current_app.config["MAX_JSON_DEPTH"]
        if len(body) < _LARGE_BODY:
            return _read(reader, body, max_depth)
        return await trio.to_thread.run_sync(_read, reader, body, max_depth, limiter=self._reading)

    async def peek_at_body(self) -> bytes:
        """The body of the request at hand, which `read_request` can still read.

        Raises ApiError and RequestTimeout as that does.
        """
        return await _receive_json(keeps=True)

    def check_model(self, name: str | None) -> str | None:
        """The name of the LoRA adapter that is meant; None: the model alone, as no name, or an empty one.

        Raises:
          ApiError: no model is served under this name (404).
        """
        if not name or name in self.model_names:
            return None
        if not self.llm.has_lora(name):
            raise model_not_found(name)
        return name

    def reply_head(self, prefix: str, request_id: str | None, model: str | None = None) -> ReplyHead:
        """Of a new reply, which names the adapter that `model` is, if it is one, else the model's first name.

        Its id is `prefix` and the header X-Request-Id, else `request_id`, else a random
        one, which the response header then tells.
        """
        if request_id and not request.headers.get(_REQUEST_ID_HEADER):
            g.request_id = _checked_request_id(request_id, "request_id")
        return ReplyHead(
            id=f"{prefix}-{g.request_id}",
            created=int(time.time()),
            model=model if model and self.llm.has_lora(model) else self.model_names[0],
            system_fingerprint=self.system_fingerprint,
        )


def _checked_request_id(request_id: str, field: str) -> str:
    """It goes into a header and into the log: one line of visible ASCII."""
    if not is_request_id(request_id):
        raise InvalidRequestError(
            f"{field} must be at most {MAX_REQUEST_ID} printable ASCII characters.", parameter=field
        )
    return request_id


def identify_requests(app: Quart) -> None:
    """Give every request an id: the client's X-Request-Id or a random one, and say it in the response."""

    async def before() -> None:
        g.request_id = uuid.uuid4().hex
        if given := current_request().headers.get(_REQUEST_ID_HEADER):
            g.request_id = _checked_request_id(given, _REQUEST_ID_HEADER)

    async def after(response: Response) -> Response:
        response.headers[_REQUEST_ID_HEADER] = g.request_id
        return response

    async def after_websocket(response: ResponseTypes | None) -> ResponseTypes | None:
        if response is not None:  # of a handshake that was refused
            response.headers[_REQUEST_ID_HEADER] = g.request_id
        return response

    app.before_request(before)
    app.after_request(after)
    app.before_websocket(before)
    app.after_websocket(after_websocket)


async def _receive_json(*, keeps: bool) -> bytes:
    """The body of the request at hand, which must be declared as JSON, and plain. Unless quart `keeps` it, it
    can be had only once.

    Raises:
      ApiError: it is not (400, 415), or is larger than the application's MAX_CONTENT_LENGTH (413).
      RequestTimeout: it did not come in the application's BODY_TIMEOUT (408).
    """
    if request.mimetype != "application/json" and not request.mimetype.endswith("+json"):
        raise unsupported_content_type(request.headers.get("Content-Type"))
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in {"identity", ""}:
        raise unsupported_content_encoding(encoding)
    try:
        # Not kept beside what is read from it: the request may last for long.
        return await request.get_data(cache=keeps, as_text=False, parse_form_data=False)
    except RequestEntityTooLarge:
        raise body_too_large(current_app.config["MAX_CONTENT_LENGTH"]) from None


def _read(reader: RequestReader[T], body: bytes, max_depth: int) -> T:
    check_json_depth(body, max_depth)
    return reader.read(body)
