"""HTTP/2 on one connection: frames to requests, responses to frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hypercorn.protocol.events import Body, EndBody, Event, Response, StreamClosed

from trioserve.server.h2_budget import FloodError, FrameBudget
from trioserve.server.h2_outbox import Outbox
from trioserve.server.h2_request import Http2Refusal, Http2Request, read_request, response_head
from trioserve.server.h2_sender import Http2Sender
from trioserve.server.h2_stream import Http2Stream
from trioserve.server.http_context import MAX_DISCARD, error_body

if TYPE_CHECKING:
    from h2.events import Event as ClientEvent
    from hpack import Encoder
    from hypercorn.typing import TaskGroup

    from trioserve.server.h11_protocol import Transport
    from trioserve.server.http_context import Address, ServingContext

__all__ = ["Http2Protocol"]

# Bytes that a client may send ahead on each stream, and on all together: so that a stream whose application
# does not take its body never holds up the others.
_STREAM_WINDOW = 65_535

# The table of headers by which responses are shortened; a client may ask for less.
_MAX_HEADER_TABLE = 4096


class _Http2Connection(H2Connection):
    MAX_CLOSED_STREAMS = 1024  # how many it remembers, to know what is late from what is wrong


class Http2Protocol:
    """Many requests at a time, each in a task and a scope of its own.

    `begin` and `receive` are for the connection's reader and never wait; `send_event` is for the requests'
    tasks. One task writes. Where the connection must end, a GOAWAY says why, and what runs is cancelled.

    Bounds: see `HttpLimits` (streams, headers, bodies), `FrameBudget` (all other frames), `Outbox` (what was
    sent and not read). A stream that may not send, because its window or the connection's is closed, waits,
    and is reset after `write_timeout` without progress.
    """

    def __init__(
        self,
        context: ServingContext,
        tasks: TaskGroup,
        addresses: tuple[Address, Address],
        transport: Transport,
    ) -> None:
        """`addresses` are the client's and the server's."""
        limits = context.limits
        self._context = context
        self._tasks = tasks
        self._addresses = addresses
        self._transport = transport
        self._h2 = _make_connection(limits.max_streams, limits.max_header_bytes)
        self._budget = FrameBudget(limits.max_header_bytes)
        self._outbox = Outbox()
        self._sender = Http2Sender(self._h2, self._outbox, self._budget, limits.write_timeout)
        # Those whose response is not complete; what comes for others is passed over.
        self._streams: dict[int, Http2Stream] = {}
        self._num_running = 0  # applications: some go on after their response, or take time to be cancelled
        self._discarded = 0
        self._idle = True  # no stream, and all that was said on them is written
        self._ending = False
        self._failed = False

    @property
    def has_unparsed_bytes(self) -> bool:
        return False

    @property
    def expects_more(self) -> bool:
        """Whether the client may be sending still, so that closing could cut off what it has yet to read."""
        return self._failed or self._h2.open_inbound_streams > 0

    def begin(self) -> None:
        """Send what opens a connection, and start the task that writes."""
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_STREAM_WINDOW * (self._context.limits.max_streams - 1))
        self._sender.flush()
        self._tasks.spawn(self._write_out)

    def client_left(self) -> None:
        """Nothing more comes, and nothing arrives: cancel what runs. Never waits."""
        self._ending = True
        self._part_all()
        self._outbox.discard()

    def drain(self) -> None:
        """Take no further requests, and end with the last of those that run."""
        if self._streams:
            self._outbox.put(self._sender.goaway())
        else:
            self._end()

    def farewell(self) -> bytes:
        """The last bytes for a client that was idle for too long."""
        return self._sender.goaway()

    async def parse(self) -> None:
        """Nothing is ever left to parse."""
        await trio.lowlevel.checkpoint()

    async def receive(self, data: bytes) -> None:
        """Take bytes of the client. Never waits for an application."""
        if self._ending:
            return
        try:
            self._budget.charge(data)
            events = self._h2.receive_data(data)
        except FloodError:
            self._fail(ErrorCodes.ENHANCE_YOUR_CALM)
            return
        except ProtocolError:  # h2 has made a GOAWAY that says what is wrong
            self._fail(None)
            return
        for event in events:
            if not self._ending:
                self._take(event)
        self._sender.flush()
        if self._outbox.overflows:  # it does not read, so nothing can be told
            self.client_left()
            self._transport.close()

    async def send_event(self, event: Event) -> None:
        """Send an event of a response, or drop it if nobody is there to read it."""
        stream = self._streams.get(event.stream_id)
        if stream is None:
            await trio.lowlevel.checkpoint()
            return
        match event:
            case Body():
                await self._send_body(stream, event.data)
            case Response():
                date = self._context.config.response_headers("h2")
                stream.head = response_head(event.status_code, [*event.headers, *date])
            case EndBody():
                self._sender.send_end(stream)
            case StreamClosed():
                self._end_stream(stream)

    async def _send_body(self, stream: Http2Stream, data: bytes) -> None:
        passed = False
        try:
            passed = await self._sender.send_body(stream, data)
        finally:
            if stream.is_cut:  # nothing can follow a part of a part
                self._reset(stream)
        if not passed:
            self._reset(stream)
            await trio.lowlevel.checkpoint()  # where the application is cancelled

    def _reset(self, stream: Http2Stream) -> None:
        if stream.stream_id in self._streams:  # else it is over, and perhaps the connection with it
            self._sender.reset(stream.stream_id, ErrorCodes.CANCEL)
            self._forget(stream)

    # What comes in

    def _take(self, event: ClientEvent) -> None:
        match event:
            case RequestReceived():
                self._take_request(event)
            case DataReceived():
                self._take_data(event)
            case StreamEnded() if stream := self._streams.get(event.stream_id):
                stream.take_end()
            case StreamReset() if stream := self._streams.get(event.stream_id):
                self._forget(stream)
            case RemoteSettingsChanged():
                _limit_header_table(self._h2.encoder)
                self._wake_all()
            case WindowUpdated(stream_id=0):
                self._wake_all()
            case WindowUpdated() if stream := self._streams.get(event.stream_id):
                stream.window.unpark_all()
            case ConnectionTerminated():
                self.client_left()
                self._transport.close()

    def _take_request(self, event: RequestReceived) -> None:
        stream_id = event.stream_id
        if self._context.draining or self._num_running >= self._context.limits.max_streams:
            self._sender.reset(stream_id, ErrorCodes.REFUSED_STREAM)  # it may be sent again, or elsewhere
            return
        request = read_request(event.headers, self._context.limits)
        if request.refusal is not None:
            self._log(request, request.refusal)
            self._answer(stream_id, request.method, _path(request.target), request.refusal)
            return
        stream = self._streams[stream_id] = Http2Stream(
            self._context,
            self._tasks,
            self._addresses,
            self.send_event,
            stream_id=stream_id,
            taken=self._acknowledge,
            ended=self._application_ended,
        )
        self._idle = False
        self._transport.set_idle(False)
        self._num_running += 1
        stream.start(request.method, request.target, request.headers, http_version="2")

    def _take_data(self, event: DataReceived) -> None:
        stream, size = self._streams.get(event.stream_id), event.flow_controlled_length
        if stream is None:
            self._pass_over(event.stream_id, size)
            return
        if stream.body_size + len(event.data) > self._context.limits.max_body_size:
            self._refuse_body(stream)
            self._pass_over(event.stream_id, size)
            return
        self._acknowledge(event.stream_id, size - len(event.data))  # the padding
        stream.take_body(event.data)

    def _pass_over(self, stream_id: int, size: int) -> None:
        """Of a body that nobody wants. Its sender has its response, and may go on sending, up to a bound."""
        self._discarded += size
        self._acknowledge(stream_id, size)
        if self._discarded > MAX_DISCARD:
            self._sender.reset(stream_id, ErrorCodes.NO_ERROR)

    def _refuse_body(self, stream: Http2Stream) -> None:
        message = f"The body is larger than {self._context.limits.max_body_size} bytes."
        if stream.has_answered:
            self._sender.reset(stream.stream_id, ErrorCodes.CANCEL)
            self._forget(stream)
            return
        stream.part(413)
        method, path = stream.scope["method"], stream.scope["path"]
        self._answer(stream.stream_id, method, path, Http2Refusal(413, message))
        self._forget(stream)

    # Ends

    def _end_stream(self, stream: Http2Stream) -> None:
        """The response is complete, or the application has returned without completing it. No checkpoint."""
        if not stream.is_complete:
            self._sender.reset(stream.stream_id, ErrorCodes.INTERNAL_ERROR)
        self._forget(stream)

    def _forget(self, stream: Http2Stream) -> None:
        """The stream is over; its application is cancelled if it did not answer completely."""
        if self._streams.pop(stream.stream_id, None) is None:
            return
        stream.part()
        self._acknowledge(stream.stream_id, stream.num_untaken)
        stream.num_untaken = 0
        if self._streams or self._ending:
            return
        if self._context.draining:
            self._end()
        else:
            self._outbox.report()

    def _wake_all(self) -> None:
        """Windows have changed."""
        for stream in self._streams.values():
            stream.window.unpark_all()

    def _part_all(self) -> None:
        for stream in list(self._streams.values()):
            stream.part()
        self._streams.clear()

    def _application_ended(self) -> None:
        self._num_running -= 1

    def _fail(self, code: ErrorCodes | None) -> None:
        """End the connection for what the client did."""
        self._failed = True
        self._part_all()
        if code is not None:
            self._outbox.put(self._sender.goaway(code))
        self._finish()

    def _end(self) -> None:
        self._outbox.put(self._sender.goaway())
        self._finish()

    def _finish(self) -> None:
        """Write what there is, and close."""
        self._ending = True
        self._sender.flush()
        self._outbox.end()

    async def _write_out(self) -> None:
        await self._outbox.write_out(self._transport.write, self._all_written)
        self._transport.close()

    def _all_written(self) -> None:
        # Once for each time that there were requests: what else a client has us write does not keep it here.
        if not self._streams and not self._idle:
            self._idle = True
            self._transport.set_idle(True)

    def _answer(self, stream_id: int, method: str, path: str, refusal: Http2Refusal) -> None:
        """Answer in the application's place."""
        body = error_body(refusal.status, refusal.message, path=path)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *refusal.headers,
            *self._context.config.response_headers("h2"),
        ]
        head = response_head(refusal.status, headers)
        self._sender.answer(stream_id, head, b"" if method == "HEAD" else body)

    def _acknowledge(self, stream_id: int, size: int) -> None:
        if not self._ending:
            self._sender.acknowledge(stream_id, size)

    def _log(self, request: Http2Request, refusal: Http2Refusal) -> None:
        path = _path(request.target)
        self._context.log_access(request.method, path, refusal.status, 0.0, self._addresses[0])


def _path(target: bytes) -> str:
    return target.partition(b"?")[0].decode()


def _limit_header_table(encoder: Encoder) -> None:
    """Use no more than the client allows, nor than we want, and tell it with the next headers.

    hpack forgets to tell where the size is set again, and would tell every size that there was in between:
    the least and the last are what matters (RFC 7541, section 4.2).
    """
    encoder.header_table_size = min(encoder.header_table_size, _MAX_HEADER_TABLE)
    if sizes := encoder.table_size_changes:
        encoder.table_size_changes = [min(sizes), sizes[-1]]
        encoder.header_table.resized = True


def _make_connection(max_streams: int, max_header_bytes: int) -> _Http2Connection:
    config = H2Configuration(
        client_side=False,
        header_encoding=None,
        # `response_head` sees to both.
        validate_outbound_headers=False,
        normalize_outbound_headers=False,
    )
    connection = _Http2Connection(config)
    values = {
        SettingCodes.MAX_CONCURRENT_STREAMS: max_streams,
        SettingCodes.MAX_HEADER_LIST_SIZE: max_header_bytes,
        SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
    }
    connection.local_settings = Settings(client=False, initial_values=values)
    connection.decoder.max_header_list_size = max_header_bytes
    return connection
