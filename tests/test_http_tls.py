"""HTTP over TLS: certificates, handshakes, and the same care for requests as on clear text."""

from __future__ import annotations

import logging
import os
import ssl
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import quart
import trio
import trio.testing

from helpers_http import DEADLINE, Client, Probe, Server, get, post, serving
from trioserve import InvalidConfigError, ServerArgs
from trioserve.server.sse import sse_response
from trioserve.server.tls import Certificates

if TYPE_CHECKING:
    from helpers_tls import Authority

LEAVING = {"close": Client.close, "half_close": Client.half_close, "reset": Client.reset}


async def test_requests_and_their_scheme(probe: Probe, authority: Authority) -> None:
    @probe.app.get("/scheme")
    async def scheme() -> str:
        return quart.request.scheme

    async with serving(probe.app, certificates=authority.certificates()) as server:
        client = await server.connect(tls=authority.client())
        for _ in range(3):
            await client.send(get("/scheme"))
            assert (await client.read_reply()).body == b"https"
        await client.send(post("/echo", bytes(1_000_000)))
        assert (await client.read_reply()).body == b'{"size":1000000}\n'


async def test_streams(probe: Probe, authority: Authority) -> None:
    async with serving(probe.app, certificates=authority.certificates()) as server:
        client = await server.connect(tls=authority.client())
        await client.send(get("/stream/gate"))
        expected = probe.gate.let(1)
        await client.read_head()
        for _ in range(100):
            assert await client.read_chunk() == expected
            expected = probe.gate.let(1)
        probe.gate.end()
        assert await client.read_chunk() == expected
        assert await client.read_chunk() == b""


async def test_much_data_arrives_whole_at_a_slow_client(probe: Probe, authority: Authority) -> None:
    sizes = [1, 15, 16, 4096, 16384, 16385, 65536, 300_000, 7, 2_000_000]

    class Blocks:
        async def next_frame(self) -> bytes | None:
            return bytes([len(sizes)]) * sizes.pop(0) if sizes else None

    @probe.app.get("/blocks")
    async def blocks() -> quart.Response:
        return sse_response(Blocks())

    expected = b"".join(bytes([10 - n]) * size for n, size in enumerate(sizes))
    async with serving(probe.app, certificates=authority.certificates()) as server:
        client = await server.connect(4096, tls=authority.client())
        await client.send(get("/blocks"))
        assert (await client.read_reply()).body == expected


@pytest.mark.parametrize(
    ("http2", "offers", "chosen"),
    [
        (False, ["h2", "http/1.1"], "http/1.1"),
        (False, ["h2"], None),
        (False, [], None),
        (True, ["http/1.1"], "http/1.1"),
        (True, ["http/1.1", "h2"], "h2"),
    ],
)
async def test_http2_only_where_both_sides_want_it(
    probe: Probe, authority: Authority, http2: bool, offers: list[str], chosen: str | None
) -> None:
    async with serving(probe.app, certificates=authority.certificates(http2=http2)) as server:
        client = await server.connect(tls=authority.client(*offers))
        assert isinstance(client.stream, trio.SSLStream)
        assert client.stream.selected_alpn_protocol() == chosen
        if chosen != "h2":
            await client.send(get("/hello"))
            assert (await client.read_reply()).body == b"hello"


async def test_old_versions_of_tls_are_not_spoken(probe: Probe, authority: Authority) -> None:
    context = authority.client()
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLS"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    certificates = authority.certificates()
    certificates.current().set_ciphers("ALL:@SECLEVEL=0")  # else OpenSSL's own rules refuse it already
    async with serving(probe.app, certificates=certificates) as server:
        with pytest.raises(trio.BrokenResourceError):
            await server.connect(tls=context)


# What goes wrong

GARBAGE = {
    "nothing": b"",
    "garbage": bytes(range(256)) * 10,
    "HTTP": get("/hello"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a record that is too long": b"\x16\x03\x01\xff\xff" + bytes(70_000),
    "half a hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(20),
}


@pytest.mark.parametrize("leaving", LEAVING)
@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
async def test_a_handshake_that_fails_ends_its_connection_alone(
    probe: Probe, authority: Authority, data: bytes, leaving: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(probe.app, certificates=authority.certificates()) as server:
        neighbour = await server.connect(tls=authority.client())
        await neighbour.send(get("/stream/gate"))
        probe.gate.let(1)
        await neighbour.read_head()
        assert await neighbour.read_chunk()
        client = await server.connect()
        await client.send(data)
        await trio.testing.wait_all_tasks_blocked(0.01)
        with suppress(OSError):  # the server may have closed already
            LEAVING[leaving](client)
        await trio.testing.wait_all_tasks_blocked(0.01)
        expected = probe.gate.let(1)
        assert await neighbour.read_chunk() == expected
    assert not caplog.records


@pytest.mark.parametrize("data", [GARBAGE["nothing"], GARBAGE["half a hello"]], ids=["silent", "slow"])
async def test_a_handshake_has_its_time(probe: Probe, authority: Authority, data: bytes) -> None:
    certificates = authority.certificates()
    async with serving(
        probe.app, certificates=certificates, handshake_timeout=0.1, keep_alive_timeout=100.0
    ) as server:
        client = await server.connect()
        await client.send(data)
        assert await client.read_to_end() == b""


async def test_a_handshake_does_not_delay_the_shutdown(probe: Probe, authority: Authority) -> None:
    async with serving(probe.app, certificates=authority.certificates()) as server:
        client = await server.connect()
        await trio.testing.wait_all_tasks_blocked(0.01)
        server.shutdown.set()
        assert await client.read_to_end() == b""
        with trio.fail_after(DEADLINE):
            await server.returned.wait()


async def test_a_client_that_does_not_trust_us(
    probe: Probe, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(probe.app, certificates=authority.certificates()) as server:
        with pytest.raises(trio.BrokenResourceError):
            await server.connect(tls=ssl.create_default_context())
        client = await server.connect(tls=authority.client())
        await client.send(get("/hello"))
        assert (await client.read_reply()).status == 200
    assert not caplog.records


async def test_clients_must_have_a_certificate_if_that_is_asked(probe: Probe, authority: Authority) -> None:
    certificates = authority.certificates(ssl_ca_certs=authority.write_ca())
    async with serving(probe.app, certificates=certificates) as server:
        known = authority.client()
        authority.ca.issue_cert("client@example.org").configure_cert(known)
        client = await server.connect(tls=known)
        await client.send(get("/hello"))
        assert (await client.read_reply()).body == b"hello"
        stranger = await server.connect(tls=authority.client())  # TLS 1.3: the refusal comes later
        with suppress(trio.BrokenResourceError):
            await stranger.send(get("/hello"))
        with pytest.raises(trio.BrokenResourceError):
            await stranger.read_reply()


# Ends


@pytest.mark.parametrize("asks", ["connection: close", None], ids=["asked to close", "idle"])
async def test_the_end_is_told(probe: Probe, authority: Authority, asks: str | None) -> None:
    certificates = authority.certificates()
    async with serving(probe.app, certificates=certificates, keep_alive_timeout=0.2) as server:
        client = await server.connect(tls=authority.client())
        await client.send(get("/hello", *([asks] if asks else [])))
        await client.read_reply()
        assert await client.read_to_end() == b""  # trio raises if there was no close_notify


async def test_an_early_refusal_of_an_upload_can_be_read(probe: Probe, authority: Authority) -> None:
    async with serving(probe.app, certificates=authority.certificates()) as server:
        client = await server.connect(tls=authority.client())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, post("/refuse", bytes(3_000_000)))
            assert (await client.read_reply()).status == 401


async def test_a_client_that_says_goodbye_ends_its_request(probe: Probe, authority: Authority) -> None:
    async with serving(probe.app, certificates=authority.certificates()) as server:
        client = await server.connect(tls=authority.client())
        await client.send(get("/wait"))
        await probe.entered.wait()
        await client.stream.aclose()  # with close_notify; `LEAVING` is without
        await probe.wait_left()


@pytest.mark.parametrize("leaving", LEAVING)
@pytest.mark.parametrize("moment", ["waiting", "idle", "sending", "blocked", "pipelined"])
async def test_leaving_ends_the_request(
    probe: Probe, authority: Authority, leaving: str, moment: str
) -> None:
    paths = {"idle": "/stream/gate", "sending": "/stream/trickle", "blocked": "/stream/flood"}
    async with serving(probe.app, certificates=authority.certificates()) as server:
        client = await server.connect(4096, tls=authority.client())
        await client.send(get(paths.get(moment, "/wait")))
        await probe.entered.wait()
        if moment in {"idle", "sending"}:
            probe.gate.let(1)
            await client.read_head()
            assert await client.read_chunk()
        if moment == "pipelined":
            await client.send(get("/hello"))
        if moment != "sending":
            await trio.testing.wait_all_tasks_blocked(0.02)
        assert not probe.left.is_set()
        LEAVING[leaving](client)
        await probe.wait_left()


async def test_a_client_that_does_not_read_is_dropped(probe: Probe, authority: Authority) -> None:
    certificates = authority.certificates()
    async with serving(probe.app, certificates=certificates, write_timeout=0.1) as server:
        client = await server.connect(4096, tls=authority.client())
        await client.send(get("/stream/flood"))
        await probe.wait_left()


# Configuration


def from_args(**paths: str) -> Certificates | None:
    return Certificates.from_args(ServerArgs(**paths))


def test_without_a_certificate_there_is_no_tls() -> None:
    assert from_args() is None


def test_one_file_may_hold_all(authority: Authority) -> None:
    certificate, key = authority.write("one")
    Path(certificate).write_bytes(Path(certificate).read_bytes() + Path(key).read_bytes())
    assert from_args(ssl_certfile=certificate) is not None


def test_a_file_that_cannot_be_used_is_named(authority: Authority) -> None:
    certificate, key = authority.write("one")
    _, other_key = authority.write("two")
    ca = authority.write_ca()
    missing, folder = str(authority.folder / "missing"), str(authority.folder)
    notes = authority.folder / "notes"
    notes.write_text("mine")
    pair = {"ssl_certfile": certificate, "ssl_keyfile": key}
    cases = [
        ("ssl_certfile", {"ssl_certfile": missing}, "No such file"),
        ("ssl_certfile", {"ssl_certfile": folder}, "Is a directory"),
        ("ssl_certfile", pair | {"ssl_certfile": str(notes)}, "certificates in PEM"),
        ("ssl_certfile", {"ssl_certfile": certificate}, "private key in PEM"),
        ("ssl_keyfile", pair | {"ssl_keyfile": missing}, "No such file"),
        ("ssl_keyfile", pair | {"ssl_keyfile": str(notes)}, "private key in PEM"),
        ("ssl_keyfile", pair | {"ssl_keyfile": other_key}, "does not belong to ssl_certfile"),
        ("ssl_ca_certs", pair | {"ssl_ca_certs": str(notes)}, "certificates in PEM"),
        ("ssl_ca_certs", pair | {"ssl_ca_certs": missing}, "No such file"),
    ]
    for field, paths, problem in cases:
        with pytest.raises(InvalidConfigError, match=problem) as caught:
            from_args(**paths)
        assert caught.value.field == field
        assert paths[field] in str(caught.value)
    assert from_args(**pair, ssl_ca_certs=ca) is not None


def test_nobody_is_asked_for_a_password(authority: Authority) -> None:
    from cryptography.hazmat.primitives import serialization

    certificate, path = authority.write("one")
    key = serialization.load_pem_private_key(Path(path).read_bytes(), None)
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    Path(path).write_bytes(secret)
    with pytest.raises(InvalidConfigError, match="without a password"):
        from_args(ssl_certfile=certificate, ssl_keyfile=path)


# A certificate that changes


async def served_name(server: Server, authority: Authority) -> str:
    """For whom the server has a certificate."""
    client = await server.connect(tls=authority.client(), name="localhost")
    await client.send(get("/hello"))
    assert (await client.read_reply()).body == b"hello"
    assert isinstance(client.stream, trio.SSLStream)
    return client.stream.getpeercert()["subjectAltName"][-1][1]


async def test_a_new_certificate_is_for_new_connections(
    probe: Probe, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trioserve.tls")
    async with serving(probe.app, certificates=authority.certificates()) as server:
        old = await server.connect(tls=authority.client())
        assert await served_name(server, authority) == "localhost"
        authority.write("server", "localhost", "second.example")
        assert await served_name(server, authority) == "second.example"
        await old.send(get("/hello"))
        assert (await old.read_reply()).body == b"hello"
        assert await served_name(server, authority) == "second.example"
    assert [record.getMessage() for record in caplog.records] == ["the TLS certificate has been replaced"]


async def test_a_broken_certificate_is_told_once_and_the_old_one_stays(
    probe: Probe, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(probe.app, certificates=authority.certificates()) as server:
        key = authority.folder / "server.key"
        right = key.read_bytes()
        key.write_text("half a k")
        for _ in range(3):
            assert await served_name(server, authority) == "localhost"
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "ssl_keyfile" in record.getMessage()
        key.unlink()
        assert await served_name(server, authority) == "localhost"
        assert len(caplog.records) == 2
        key.write_bytes(right)
        authority.write("server", "localhost", "third.example")
        assert await served_name(server, authority) == "third.example"


async def test_a_file_that_vanishes_while_it_is_read_does_no_harm(
    probe: Probe, authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = authority.certificates()
    authority.write("server", "localhost", "second.example")

    def load_cert_chain(*_args: object, **_options: object) -> None:
        raise FileNotFoundError

    with monkeypatch.context() as patch:
        patch.setattr(ssl.SSLContext, "load_cert_chain", load_cert_chain)
        assert certificates.current() is certificates.current()
    async with serving(probe.app, certificates=certificates) as server:
        assert await served_name(server, authority) == "localhost"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


async def test_files_may_be_left_alone(probe: Probe, authority: Authority) -> None:
    certificates = authority.certificates(enable_ssl_refresh=False)
    async with serving(probe.app, certificates=certificates) as server:
        authority.write("server", "localhost", "second.example")
        os.utime(authority.folder / "server.pem")
        assert await served_name(server, authority) == "localhost"
