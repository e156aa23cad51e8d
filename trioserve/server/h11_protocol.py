"""HTTP/1.1 on one connection: bytes to requests, responses to bytes."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

import h11
import trio
from hypercorn.protocol.events import Body, EndBody, Event, Response, StreamClosed

from trioserve.server.http_context import error_body
from trioserve.server.request_ids import REQUEST_ID_HEADER, given_request_id, is_request_id
from trioserve.server.request_stream import STREAM_ID, RequestStream
from trioserve.server.websocket.frames import WebsocketProtocol
from trioserve.server.websocket.handshake import Handshake, Refusal, asks_for_websocket, read_handshake
from trioserve.server.websocket.stream import WebsocketStream

if TYPE_CHECKING:
    from hypercorn.typing import TaskGroup

    from trioserve.server.http_context import Address, ServingContext
    from trioserve.server.request_stream import Unsent

__all__ = ["Http1Protocol", "Transport", "is_chunked"]

_UNKNOWN = b"-"

# Each costs microseconds to parse and to hand on: 64 KiB of the shortest would hold up all connections.
_MAX_HEADER_LINES = 100

# Of a body that nobody wants: to pass over more than that would hold up the other connections.
_MAX_SKIPPED_PARTS = 64

_HOST = re.compile(rb"https?://[^/?]*", re.IGNORECASE)
_HEAD_END = re.compile(rb"\n\r?\n")
_ID_LINE = re.compile(rb"\n" + REQUEST_ID_HEADER + rb":([^\r\n]*)\r?\n", re.IGNORECASE)


class Transport(Protocol):
    """What the protocol asks of its connection. Only `write` waits."""

    async def write(self, data: bytes) -> None:
        """Send all of `data`; what cannot be sent because the client is gone is dropped."""

    def write_now(self, data: bytes) -> Unsent | None:
        """Send all of `data` without waiting, or return what sends what is left of it."""

    def set_idle(self, idle: bool) -> None:
        """Whether the connection is between two requests."""

    def resume(self) -> None:
        """Have the reader call `Http1Protocol.parse`, without waiting for more bytes."""

    def switch(self, protocol: WebsocketProtocol) -> None:
        """What the client sends from now on is for `protocol`, whose `parse` the reader calls."""

    def close(self) -> None:
        """Nothing more will be written."""


class Http1Protocol:
    """One request at a time, in order; what a client sends ahead waits in h11's buffer, up to a bound.

    Takes the place of hypercorn's `H11Protocol`, and differs in this: it never stops the reader, so the end
    of the connection is seen while a request runs; it does not speak HTTP/2, and leaves the connection to
    `WebsocketProtocol` once a handshake was accepted (any other `Upgrade` is ignored, as the standard
    allows); it answers broken and unwelcome requests with an OpenAI error object;
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
        self._h11 = _open_h11(context.limits.max_header_bytes)
        self._stream: RequestStream | WebsocketStream | None = None
        self._method = self._target = _UNKNOWN
        self._request_id = b""  # as the client gave it, if it may be said back
        self._body_size = 0
        self._head = b""  # of a response whose body has not begun
        self._chunked = False
        # True from the moment when a whole request is read and more has arrived, to the end of its response.
        # Meanwhile nothing is parsed.
        self._paused = False

    @property
    def has_unparsed_bytes(self) -> bool:
        """Whether a part of a next request is there."""
        return bool(self._unparsed.lstrip(b"\r\n"))  # as `_skip_empty_lines`

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
        if len(self._unparsed) > self._context.limits.max_pipelined_bytes:
            self.client_left()
            self._transport.close()

    async def parse(self) -> None:
        """Handle what is in the buffer, as far as it goes."""
        while True:
            self._skip_empty_lines()
            if refusal := self._objection_to_head():
                await self._refuse(refusal)
                return
            await self._send_continue()
            try:
                event = self._next_event()
            except h11.RemoteProtocolError as error:
                await self._refuse(self._explain(error))
                return
            if event is h11.PAUSED:
                self._paused = True
                return
            if not isinstance(event, (h11.Request, h11.Data, h11.EndOfMessage)):
                return
            if self._stream is None and not isinstance(event, h11.Request):
                return  # answered before its body had come, so the connection is closing
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

    async def switch(self, headers: list[tuple[bytes, bytes]], stream: WebsocketStream) -> WebsocketProtocol:
        """Accept a handshake, with these headers. From then on the connection is for what is returned."""
        await self._transport.write(
            self._h11.send(h11.InformationalResponse(status_code=101, headers=headers))
        )
        limits = self._context.limits
        websocket = WebsocketProtocol(limits, self._transport, self._tasks, stream, self._unparsed)
        self._transport.switch(websocket)
        return websocket

    @property
    def _unparsed(self) -> bytes:
        return self._h11.trailing_data[0]

    def _next_event(self) -> object:
        """What h11 finds in the buffer.

        Raises:
          h11.RemoteProtocolError: it is not HTTP/1.1, or does not end.
        """
        # What follows a request that was to be the last is ignored (RFC 9112, section 9.6).
        if self._h11.their_state is h11.MUST_CLOSE and self._unparsed:
            return h11.PAUSED
        return self._h11.next_event()

    async def _take(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> Refusal | None:
        if isinstance(event, h11.Request):
            return self._take_request(event)
        assert self._stream is not None
        if isinstance(event, h11.EndOfMessage):
            await self._stream.handle(EndBody(stream_id=STREAM_ID))
            return None
        self._body_size += len(event.data)
        if self._body_size > self._context.limits.max_body_size:
            return self._body_too_large()
        await self._stream.handle(Body(stream_id=STREAM_ID, data=bytes(event.data)))
        return None

    def _take_request(self, request: h11.Request) -> Refusal | None:
        self._method, self._target = bytes(request.method), bytes(request.target)
        self._request_id = given_request_id(request.headers)
        self._body_size = 0
        self._transport.set_idle(False)
        if refusal := self._objection(request):
            return refusal
        target = _origin_form(self._method, self._target)
        if target is None:
            return Refusal(400, "The target of the request must be a path.")
        if asks_for_websocket(request):
            handshake = read_handshake(request)
            if isinstance(handshake, Refusal):
                return handshake
            self._stream = self._make_websocket(handshake)
        else:
            self._stream = self._make_stream()
        self._stream.begin(request, target)
        return None

    def _make_stream(self) -> RequestStream:
        # Through TLS, nothing is ever sent without waiting.
        send_now = self._send_body_now if self._context.certificates is None else None
        return RequestStream(self._context, self._tasks, self._addresses, self.send_event, send_now=send_now)

    def _make_websocket(self, handshake: Handshake) -> WebsocketStream:
        return WebsocketStream(self._context, self._tasks, self._addresses, self, handshake)

    def _objection(self, request: h11.Request) -> Refusal | None:
        if request.http_version not in {b"1.0", b"1.1"}:
            return Refusal(505, "Only HTTP/1.1 is spoken here.")
        if self._method != self._method.upper():
            # ASGI has methods in capitals only; to h11, "head" is not HEAD (RFC 9110, section 9.1).
            return Refusal(501, "Methods are spelled in capital letters.")
        if self._context.draining:
            return Refusal(503, "The server is shutting down.")
        headers = dict(request.headers)
        if b"transfer-encoding" in headers and (
            b"content-length" in headers or request.http_version == b"1.0"
        ):
            # A proxy in front may see the body end elsewhere (RFC 9112, section 6.1).
            return Refusal(400, "Transfer-Encoding goes neither with Content-Length nor with HTTP/1.0.")
        if int(headers.get(b"content-length", 0)) > self._context.limits.max_body_size:
            return self._body_too_large()
        return None

    def _body_too_large(self) -> Refusal:
        return Refusal(413, f"The body is larger than {self._context.limits.max_body_size} bytes.")

    def _explain(self, error: h11.RemoteProtocolError) -> Refusal:
        if error.error_status_hint != 431:
            return Refusal(error.error_status_hint, f"The request is not valid HTTP/1.1: {error}"[:300])
        # h11 says 431 of whatever does not end, and of the head that is found before (`_objection_to_head`).
        limit = self._context.limits.max_header_bytes
        return Refusal(400, f"A line between the chunks of the body is longer than {limit} bytes.")

    def _skip_empty_lines(self) -> None:
        """Before a request: some clients send one after a body (RFC 9112, section 2.2)."""
        if self._h11.their_state is h11.IDLE and self._unparsed[:1] in {b"\r", b"\n"}:
            rest = self._unparsed.lstrip(b"\r\n")
            self._h11 = _open_h11(self._context.limits.max_header_bytes)
            if rest:  # to h11, no bytes are the end of the connection
                self._h11.receive_data(rest)

    def _objection_to_head(self) -> Refusal | None:
        """Looks before h11 does, because parsing is what costs."""
        if self._h11.their_state is not h11.IDLE:
            return None
        unparsed, limit = self._unparsed, self._context.limits.max_header_bytes
        if len(unparsed) > limit and not _HEAD_END.search(unparsed, 0, limit):
            message = f"The headers of the request are longer than {limit} bytes."
        elif _num_head_lines(unparsed) > _MAX_HEADER_LINES + 1:
            message = f"The request has more than {_MAX_HEADER_LINES} header lines."
        else:
            return None
        self._request_id = _unparsed_request_id(unparsed)
        return Refusal(431, message)

    async def _refuse(self, refusal: Refusal) -> None:
        """Answer in the application's place, if there is no answer yet, and end the connection."""
        can_answer = self._h11.our_state in {h11.IDLE, h11.SEND_RESPONSE}
        if self._stream is not None:
            self._stream.part(refusal.status if can_answer else None)
            self._stream = None
        else:
            method = self._method.decode()
            self._context.log_access(method, self._path, refusal.status, 0.0, self._addresses[0])
        if can_answer:
            await self._transport.write(self._encode_refusal(refusal))
        self._skip_request()
        self._transport.close()

    @property
    def _path(self) -> str:
        """As the client wrote it, without the query."""
        return self._target.partition(b"?")[0].decode()

    def _skip_request(self) -> None:
        """Pass over what has come of the request, so that `expects_more` knows whether that was all."""
        if self._h11.their_state is not h11.SEND_BODY:
            return
        with suppress(h11.RemoteProtocolError):
            for _ in range(_MAX_SKIPPED_PARTS):
                if not isinstance(self._h11.next_event(), (h11.Data, h11.EndOfMessage)):
                    return

    def _encode_refusal(self, refusal: Refusal) -> bytes:
        body = error_body(refusal.status, refusal.message, path=self._path)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *refusal.headers,
            *self._context.config.response_headers("h11"),
        ]
        if self._request_id:
            headers.append((REQUEST_ID_HEADER, self._request_id))
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
        if self._head:
            await trio.lowlevel.checkpoint_if_cancelled()  # from here on the head counts as sent
        # h11's state does not change with a chunk, so the most frequent event need not go through it.
        if self._chunked and self._h11.our_state is h11.SEND_BODY:
            framed = b"%x\r\n%b\r\n" % (len(data), data)
        else:
            framed = self._h11.send(h11.Data(data=data))
        if self._head:
            framed, self._head = self._head + framed, b""
        await self._transport.write(framed)

    def _send_body_now(self, data: bytes) -> Unsent | None:
        """As `_send_body`, without waiting."""
        if self._head or not self._chunked or self._h11.our_state is not h11.SEND_BODY:
            return partial(self._send_body, data)
        return self._transport.write_now(b"%x\r\n%b\r\n" % (len(data), data))

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
        self._request_id = b""
        self._transport.set_idle(True)
        if self._paused:
            self._paused = False
            self._transport.resume()


def _open_h11(max_header_bytes: int) -> h11.Connection:
    return h11.Connection(h11.SERVER, max_header_bytes)


def is_chunked(head: bytes) -> bool:
    """Whether this head, as h11 wrote it, announces a chunked body."""
    return b"\r\ntransfer-encoding: chunked\r\n" in head.lower()


def _num_head_lines(unparsed: bytes) -> int:
    """Complete lines of the head at the start of `unparsed`, the request line included."""
    if unparsed.count(b"\n") <= _MAX_HEADER_LINES:
        return 0  # few enough, wherever the head ends
    end = _HEAD_END.search(unparsed)
    return unparsed.count(b"\n", 0, end.start() + 1 if end else None)


def _unparsed_request_id(head: bytes) -> bytes:
    """Of a request whose head is too long to be parsed."""
    line = _ID_LINE.search(head)
    given = line[1].strip(b" \t") if line else b""
    return given if is_request_id(given.decode("latin-1")) else b""


def _origin_form(method: bytes, target: bytes) -> bytes | None:
    """The target as a path; `http://host/path` counts as `/path` (RFC 9112, section 3.2.2)."""
    if target.startswith(b"/") or (method == b"OPTIONS" and target == b"*"):
        return target
    host = _HOST.match(target)
    if host is None:
        return None
    return b"/" + target[host.end() :].removeprefix(b"/")
