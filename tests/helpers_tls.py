"""Certificates, and a client that speaks HTTP/2."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, TypeVar

import attrs
import h2.config
import h2.connection
import h2.events
import trio
import trustme

from helpers_http import DEADLINE, Client, Reply, Server
from trioserve import ServerArgs
from trioserve.server.tls import Certificates

EventT = TypeVar("EventT", bound=h2.events.Event)


@attrs.define
class Authority:
    """Makes certificates, and clients that trust them."""

    folder: Path
    ca: trustme.CA = attrs.field(factory=trustme.CA)

    def write(self, name: str, *hosts: str) -> tuple[str, str]:
        """Files of a certificate and its key."""
        leaf = self.ca.issue_cert(*(hosts or ("localhost",)))
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        key.write_bytes(leaf.private_key_pem.bytes())
        return str(certificate), str(key)

    def write_ca(self) -> str:
        path = self.folder / "ca.pem"
        path.write_bytes(self.ca.cert_pem.bytes())
        return str(path)

    def certificates(self, **options: Any) -> Certificates:
        certificate, key = self.write("server")
        args = ServerArgs(ssl_certfile=certificate, ssl_keyfile=key, **options)
        found = Certificates.from_args(args)
        assert found is not None
        return found

    def client(self, *protocols: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the system's authorities take 20 ms to load
        self.ca.configure_trust(context)
        if protocols:
            context.set_alpn_protocols(protocols)
        return context


@attrs.define
class Http2Client:
    """Speaks HTTP/2 as the h2 library has it; `send_raw` and `h2` are there for what it would not do."""

    client: Client
    h2: h2.connection.H2Connection
    events: list[h2.events.Event] = attrs.field(factory=list)
    # Whether data that is read is acknowledged, so that more may come.
    acknowledges: bool = True

    @classmethod
    async def connect(
        cls,
        server: Server,
        authority: Authority,
        *,
        receive_buffer: int | None = None,
        window: int | None = None,
        checks: bool = True,
    ) -> Http2Client:
        """`window` is what each stream may send; without `checks`, wrong headers are sent as well."""
        client = await server.connect(receive_buffer, tls=authority.client("h2"))
        config = h2.config.H2Configuration(
            header_encoding="utf-8", validate_outbound_headers=checks, normalize_outbound_headers=checks
        )
        self = cls(client, h2.connection.H2Connection(config))
        self.h2.initiate_connection()
        if window is not None:
            self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        await self.flush()
        return self

    async def flush(self) -> None:
        await self.client.send(self.h2.data_to_send())

    async def send_raw(self, data: bytes) -> None:
        await self.flush()
        await self.client.send(data)

    async def begin(self, path: str, *, method: str = "GET", end: bool = True, **headers: str) -> int:
        """Send the headers of a request; its stream."""
        stream_id = self.h2.get_next_available_stream_id()
        pseudo = [(":method", method), (":scheme", "https"), (":path", path), (":authority", "localhost")]
        more = [(name.replace("_", "-"), value) for name, value in headers.items()]
        self.h2.send_headers(stream_id, pseudo + more, end_stream=end)
        await self.flush()
        return stream_id

    async def ask(self, path: str, **options: Any) -> Reply:
        return await self.read_reply(await self.begin(path, **options))

    async def post(self, path: str, body: bytes, **options: Any) -> Reply:
        stream_id = await self.begin(path, method="POST", end=False, **options)
        await self.send_body(stream_id, body)
        return await self.read_reply(stream_id)

    async def send_body(self, stream_id: int, body: bytes) -> None:
        """Send it as far as the server takes it, and the end; stops early if there is an answer to read."""
        rest = memoryview(body)
        while rest:
            size = min(
                self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size, len(rest)
            )
            if not size:
                await self.more()
                continue
            self.h2.send_data(stream_id, bytes(rest[:size]))
            rest = rest[size:]
            await self.flush()
        self.h2.end_stream(stream_id)
        await self.flush()

    async def more(self) -> None:
        """Read what is there.

        Raises:
          EOFError: the server has closed.
        """
        with trio.fail_after(DEADLINE):
            data = await self.client.stream.receive_some(65536)
        if not data:
            raise EOFError
        for event in self.h2.receive_data(bytes(data)):
            if isinstance(event, h2.events.DataReceived) and self.acknowledges:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            self.events.append(event)
        if self.h2.state_machine.state is not h2.connection.ConnectionState.CLOSED:
            await self.flush()

    async def wait_for(self, kind: type[EventT], stream_id: int | None = None) -> EventT:
        """The first event of a kind that is not taken yet."""
        while True:
            for event in self.events:
                if isinstance(event, kind) and stream_id in {None, getattr(event, "stream_id", None)}:
                    self.events.remove(event)
                    return event
            await self.more()

    async def read_data(self, stream_id: int) -> bytes:
        return (await self.wait_for(h2.events.DataReceived, stream_id)).data

    async def read_status(self, stream_id: int) -> int:
        head = await self.wait_for(h2.events.ResponseReceived, stream_id)
        return int(dict(head.headers)[":status"])

    async def read_reply(self, stream_id: int) -> Reply:
        head = await self.wait_for(h2.events.ResponseReceived, stream_id)
        await self.wait_for(h2.events.StreamEnded, stream_id)
        parts = [
            event
            for event in self.events
            if isinstance(event, h2.events.DataReceived) and event.stream_id == stream_id
        ]
        self.events = [event for event in self.events if event not in parts]
        headers = dict(head.headers)
        return Reply(int(headers.pop(":status")), headers, b"".join(part.data for part in parts))

    async def read_to_end(self) -> None:
        """Until the server closes."""
        try:
            while True:
                await self.more()
        except EOFError:
            return


__all__ = ["Authority", "Http2Client"]
