"""HTTP/1.1 on one connection: bytes to requests, responses to bytes."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import attrs
import h11
from hypercorn.protocol.events import Body, EndBody, Event, Response, StreamClosed

from trioserve.server.http_context import error_body
from trioserve.server.request_stream import STREAM_ID, RequestStream

if TYPE_CHECKING:
    from hypercorn.typing import TaskGroup

    from trioserve.server.http_context import Address, ServingContext

__all__ = ["Http1Protocol", "Transport", "is_chunked"]

_UNKNOWN = b"-"


class Transport(Protocol):
    """What the protocol asks of its connection. Only `write` waits."""

    async def write(self, data: bytes) -> None:
        """Send all of `data`; what cannot be sent because the client is gone is dropped."""

    def set_idle(self, idle: bool) -> None:
        """Whether the connection is between two requests."""

    def resume(self) -> None:
        """Have the reader call `Http1Protocol.parse`, without waiting for more bytes."""

    def close(self) -> None:
        """Nothing more will be written."""


@attrs.frozen
class _Refusal:
    status: int
    message: str


class Http1Protocol:
    """One request at a time, in order; what a client sends ahead waits in h11's buffer, up to a bound.

    Takes the place of hypercorn's `H11Protocol`, and differs in this: it never stops the reader, so the end
    of the connection is seen while a request runs; it speaks neither HTTP/2 nor WebSocket (`Upgrade` is
    ignored, as the standard allows); it answers broken and unwelcome requests with an OpenAI error object;
    the head of a response goes out with the first part of its body, as ASGI demands.

    `parse` and `receive` are for the connection's reader, `send_event` is for the request's task.
    """

    def __init__(
        self,
        context: ServingContext,
        tasks: TaskGroup,
        addresses: tuple[Address, Address],
        transport: Transport,
    ) -> None:
        """`addresses` are the client's and the server's."""
        self._context = context
        self._tasks = tasks
        self._addresses = addresses
        self._transport = transport
        self._h11 = h11.Connection(h11.SERVER, context.limits.max_header_bytes)
        self._stream: RequestStream | None = None
        self._method = self._target = _UNKNOWN
        self._body_size = 0
        self._head = b""  # of a response whose body has not begun
        self._chunked = False
        # True from the moment when a whole request is read and more has arrived, to the end of its response.
        # Meanwhile nothing is parsed; `_pipelined` counts the bytes that come.
        self._paused = False
        self._pipelined = 0

    @property
    def has_unparsed_bytes(self) -> bool:
        """Whether a part of a next request is there."""
        return bool(self._h11.trailing_data[0])

    @property
    def expects_more(self) -> bool:
        """Whether the client may be sending still, so that closing could cut off what it has yet to read."""
        return self._h11.their_state in {h11.SEND_BODY, h11.ERROR} or self.has_unparsed_bytes

    def client_left(self) -> None:
        """No more bytes will come: cancel the request that runs. Never waits."""
        if self._stream is not None:
            self._stream.part()
            self._stream = None

    async def receive(self, data: bytes) -> None:
        """Take bytes of the client. Waits where the application does not keep up with the body."""
        self._h11.receive_data(data)
        if not self._paused:
            await self.parse()
            return
        self._pipelined += len(data)
        if self._pipelined > self._context.limits.max_pipelined_bytes:
            self.client_left()
            self._transport.close()

    async def parse(self) -> None:
        """Handle what is in the buffer, as far as it goes."""
        while True:
            await self._send_continue()
            try:
                event = self._h11.next_event()
            except h11.RemoteProtocolError as error:
                await self._refuse(self._explain(error))
                return
            if event is h11.PAUSED:
                self._paused = True
                return
            if not isinstance(event, (h11.Request, h11.Data, h11.EndOfMessage)):
                return
            refusal = await self._take(event)
            if refusal is not None:
                await self._refuse(refusal)
                return

    async def send_event(self, event: Event) -> None:
        """Send an event of the response."""
        match event:
            case Body():
                await self._send_body(event.data)
            case Response():
                self._head = self._encode_head(event)
                self._chunked = is_chunked(self._head)
            case EndBody():
                data = self._head + self._h11.send(h11.EndOfMessage())
                self._head = b""
                if data:
                    await self._transport.write(data)
            case StreamClosed():
                self._recycle()

    async def _take(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> _Refusal | None:
        if isinstance(event, h11.Request):
            return self._take_request(event)
        if self._stream is None:
            return None
        if isinstance(event, h11.EndOfMessage):
            await self._stream.handle(EndBody(stream_id=STREAM_ID))
            return None
        self._body_size += len(event.data)
        if self._body_size > self._context.limits.max_body_size:
            return self._body_too_large()
        await self._stream.handle(Body(stream_id=STREAM_ID, data=bytes(event.data)))
        return None

    def _take_request(self, request: h11.Request) -> _Refusal | None:
        self._method, self._target = bytes(request.method), bytes(request.target)
        self._body_size = 0
        self._transport.set_idle(False)
        if request.http_version not in {b"1.0", b"1.1"}:
            return _Refusal(505, "Only HTTP/1.1 is spoken here.")
        if self._context.draining:
            return _Refusal(503, "The server is shutting down.")
        if _content_length(request) > self._context.limits.max_body_size:
            return self._body_too_large()
        target = _origin_form(self._method, self._target)
        if target is None:
            return _Refusal(400, "The target of the request must be a path.")
        self._stream = RequestStream(self._context, self._tasks, self._addresses, self.send_event)
        self._stream.begin(request, target)
        return None

    def _body_too_large(self) -> _Refusal:
        return _Refusal(413, f"The body is larger than {self._context.limits.max_body_size} bytes.")

    def _explain(self, error: h11.RemoteProtocolError) -> _Refusal:
        if error.error_status_hint == 431:  # h11 says so of whatever does not end
            limit = self._context.limits.max_header_bytes
            return _Refusal(431, f"The headers of the request are longer than {limit} bytes.")
        return _Refusal(error.error_status_hint, f"The request is not valid HTTP/1.1: {error}"[:300])

    async def _refuse(self, refusal: _Refusal) -> None:
        """Answer in the application's place, if there is no answer yet, and end the connection."""
        can_answer = self._h11.our_state in {h11.IDLE, h11.SEND_RESPONSE}
        if self._stream is not None:
            self._stream.part(refusal.status if can_answer else None)
            self._stream = None
        else:
            method, path = self._method.decode(), self._target.partition(b"?")[0].decode()
            self._context.log_access(method, path, refusal.status, 0.0, self._addresses[0])
        if can_answer:
            await self._transport.write(self._encode_refusal(refusal))
        self._skip_request()
        self._transport.close()

    def _skip_request(self) -> None:
        """Pass over what has come of the request, so that `expects_more` knows whether that was all."""
        with suppress(h11.RemoteProtocolError):
            while isinstance(self._h11.next_event(), (h11.Data, h11.EndOfMessage)):
                pass

    def _encode_refusal(self, refusal: _Refusal) -> bytes:
        body = error_body(refusal.status, refusal.message)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *self._context.config.response_headers("h11"),
        ]
        if refusal.status == 503:
            headers.append((b"retry-after", b"1"))
        head = self._h11.send(h11.Response(status_code=refusal.status, headers=headers))
        data = b"" if self._method == b"HEAD" else self._h11.send(h11.Data(data=body))
        return head + data + self._h11.send(h11.EndOfMessage())

    async def _send_continue(self) -> None:
        if self._h11.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[])
            await self._transport.write(self._h11.send(go_on))

    def _encode_head(self, response: Response) -> bytes:
        headers = [*response.headers, *self._context.config.response_headers("h11")]
        if self._context.draining or self._h11.their_state is h11.SEND_BODY:
            headers.append((b"connection", b"close"))
        return self._h11.send(h11.Response(status_code=response.status_code, headers=headers))

    async def _send_body(self, data: bytes) -> None:
        # h11's state does not change with a chunk, so the most frequent event need not go through it.
        if self._chunked and self._h11.our_state is h11.SEND_BODY:
            framed = b"%x\r\n%b\r\n" % (len(data), data)
        else:
            framed = self._h11.send(h11.Data(data=data))
        if self._head:
            framed, self._head = self._head + framed, b""
        await self._transport.write(framed)

    def _recycle(self) -> None:
        """The response is complete, or the application has returned without completing it.

        Runs in the application's task, where a cancellation may be waiting: so it has no checkpoint.
        """
        self.client_left()
        complete = self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE
        if not complete or (self._context.draining and not self.has_unparsed_bytes):
            self._transport.close()
            return
        self._h11.start_next_cycle()
        self._method = self._target = _UNKNOWN
        self._transport.set_idle(True)
        if self._paused:
            self._paused, self._pipelined = False, 0
            self._transport.resume()


def is_chunked(head: bytes) -> bool:
    """Whether this head, as h11 wrote it, announces a chunked body."""
    return b"\r\ntransfer-encoding: chunked\r\n" in head.lower()


def _content_length(request: h11.Request) -> int:
    return next((int(value) for name, value in request.headers if name == b"content-length"), 0)


def _origin_form(method: bytes, target: bytes) -> bytes | None:
    """The target as a path; `http://host/path` counts as `/path` (RFC 9112, section 3.2.2)."""
    if target.startswith(b"/") or (method == b"OPTIONS" and target == b"*"):
        return target
    if not target.lower().startswith((b"http://", b"https://")):
        return None
    return b"/" + target.partition(b"://")[2].partition(b"/")[2]
