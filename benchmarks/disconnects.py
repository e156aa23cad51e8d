"""How soon a request ends when its client leaves.

    python benchmarks/disconnects.py [--repeat 20]
    python benchmarks/disconnects.py --url http://127.0.0.1:8000 [--repeat 10]

Without a URL: server, a probe application and clients in this process; from the client's action to the end of
the request's scope. HTTP/1.1 in clear text, and, with the package `trustme`, through TLS, and HTTP/2.

With a URL: a running `trioserve serve` that nobody else uses; from the client's action until /metrics shows
as many requests as before it came. The request waits in the queue if the server runs one at a time
(`--max-num-seqs 1`); without that, the row is left out.

Prints Markdown tables: median and maximum, in milliseconds. From outside they are as fine as the answers of
/metrics come, which take some milliseconds while the engine computes.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import socket
import ssl
import statistics
import tempfile
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import trio
from disconnect_clients import HTTP2_WAYS, WAYS, Client, Http2Client, connect
from quart import Response, request

from trioserve.server.http import HttpLimits, serve_http
from trioserve.server.request_scope import App, request_stack
from trioserve.server.sse import sse_response
from trioserve.server.tls import Certificates
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from disconnect_clients import Way

    Moment = Callable[[Client], Awaitable[None]]

PATIENCE = 20.0


# The server's part: a probe application in this process


class Frames:
    """The first at once, then as fast as asked, every millisecond, or never."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.first = True

    async def next_frame(self) -> bytes:
        if not self.first and self.kind == "idle":
            await trio.sleep_forever()
        if self.kind == "sending":
            await trio.sleep(0.001)
        self.first = False
        return b"x" * 65536 if self.kind == "blocked" else b"data: x\n\n"


class Probe:
    """Tells when a request began, and when its scope ended."""

    def __init__(self) -> None:
        self.app = App("probe")
        self.app.before_request(self._enter)
        self.app.after_request(self._hold)
        self.app.post("/body")(self.body)
        self.app.get("/wait")(self.wait)
        self.app.get("/held")(self.held)
        self.app.get("/stream/<kind>")(self.stream)
        self.expect()

    def expect(self) -> None:
        self.entered, self.left = trio.Event(), trio.Event()
        self.left_at = 0.0

    async def _enter(self) -> None:
        self.entered.set()
        request_stack().callback(self._leave)

    def _leave(self) -> None:
        self.left_at = time.perf_counter()
        self.left.set()

    async def _hold(self, response: Response) -> Response:
        if request.path == "/held":
            await trio.sleep_forever()
        return response

    async def body(self) -> str:
        return str(len(await request.get_data()))

    async def held(self) -> str:
        return "held"

    async def wait(self) -> str:
        await trio.sleep_forever()
        raise AssertionError

    async def stream(self, kind: str) -> Response:
        return sse_response(Frames(kind))


async def half_a_body(client: Client) -> None:
    await client.send("POST", "/body", b"half", missing=4)


async def in_a_stream(kind: str, client: Client) -> None:
    await client.send("GET", f"/stream/{kind}")
    await client.read_some()


async def behind(client: Client) -> None:
    await client.send("GET", "/wait")
    await client.send("GET", "/held")


MOMENTS: dict[str, Moment] = {
    "the body is coming": half_a_body,
    "the handler waits": lambda client: client.send("GET", "/wait"),
    "between handler and body": lambda client: client.send("GET", "/held"),
    "a stream is idle": partial(in_a_stream, "idle"),
    "a stream is sending": partial(in_a_stream, "sending"),
    "a write is blocked": lambda client: client.send("GET", "/stream/blocked"),
    "a second request waits": behind,
}


@asynccontextmanager
async def serving(probe: Probe, certificates: Certificates | None) -> AsyncIterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    serve = partial(
        serve_http,
        probe.app,
        [listener],
        HttpLimits(),
        shutdown=trio.Event(),
        access_log=False,
        certificates=certificates,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        yield listener.getsockname()
        nursery.cancel_scope.cancel()


async def time_of_one(probe: Probe, client: Client, moment: Moment, way: Way) -> float:
    probe.expect()
    await moment(client)
    await probe.entered.wait()
    await trio.sleep(0.01)
    started = time.perf_counter()
    await way(client)
    with trio.fail_after(PATIENCE):
        await probe.left.wait()
    await client.close()
    return (probe.left_at - started) * 1e3


async def measure_serving(
    repeat: int, title: str, ways: dict[str, Way], certificates: Certificates | None, open_client: Any
) -> None:
    probe = Probe()
    print_head(title, ways)
    async with serving(probe, certificates) as address:
        for name, moment in MOMENTS.items():
            if "GOAWAY" in ways and moment is behind:
                continue  # HTTP/2 runs both
            cells = [
                [await time_of_one(probe, await open_client(address), moment, way) for _ in range(repeat)]
                for way in ways.values()
            ]
            print_row(name, cells)


async def measure_in_process(repeat: int) -> None:
    await measure_serving(repeat, "HTTP/1.1", WAYS, None, connect)
    import trustme  # noqa: PLC0415  # only tests and this need it

    authority = trustme.CA()
    with tempfile.TemporaryDirectory() as directory:
        pem = str(Path(directory) / "server.pem")
        authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(pem)
        for title, kind, protocol, ways in (
            ("HTTP/1.1 through TLS", Client, "http/1.1", WAYS),
            ("HTTP/2", Http2Client, "h2", HTTP2_WAYS),
        ):
            tls = ssl.create_default_context()
            authority.configure_trust(tls)
            tls.set_alpn_protocols([protocol])
            certificates = Certificates.from_args(ServerArgs(ssl_certfile=pem, http2=protocol == "h2"))
            await measure_serving(repeat, title, ways, certificates, partial(connect, kind=kind, tls=tls))


# A server with its engine, from outside


class Metrics:
    """What the server tells of itself, over a connection that stays open."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def read(self, *names: bytes) -> list[float]:
        """The sum of each over its labels."""
        await self._client.send("GET", "/metrics")
        text = b""
        while b"\r\n\r\n" not in text:
            text += await self._client.read_some()
        head, _, text = text.partition(b"\r\n\r\n")
        size = int(re.search(rb"content-length: (\d+)", head.lower())[1])  # type: ignore[index]
        while len(text) < size:
            text += await self._client.read_some()
        samples = [
            re.findall(rb"^trioserve:%b(?:{[^}]*})? (\S+)$" % name, text, re.MULTILINE) for name in names
        ]
        return [sum(map(float, found)) for found in samples]

    async def wait_for(self, running: int, waiting: int) -> None:
        with trio.fail_after(PATIENCE):
            while True:
                if await self.levels() == [running, waiting]:
                    return

    async def close(self) -> None:
        await self._client.close()

    async def levels(self) -> list[float]:
        return await self.read(b"num_requests_running", b"num_requests_waiting")


async def complete(client: Client, prompt: str = "Once upon a time", **fields: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True, **fields}
    await client.send("POST", "/v1/completions", json.dumps(body).encode())


async def prefilling(metrics: Metrics, client: Client) -> None:
    await complete(client, prompt="word " * 1500)
    await metrics.wait_for(1, 0)


async def mid_stream(_: Metrics, client: Client) -> None:
    await complete(client)
    while b"data: " not in await client.read_some():
        pass


async def write_blocked(_: Metrics, client: Client) -> None:
    await complete(client, n=4, logprobs=5)
    await trio.sleep(3)


async def queued(metrics: Metrics, client: Client) -> None:
    await complete(client)
    await metrics.wait_for(1, 1)


async def time_of_one_outside(connect_: Any, moment: Any, way: Way) -> float:
    metrics, client = Metrics(await connect_()), await connect_()
    levels = await metrics.levels()
    await moment(metrics, client)
    started = time.perf_counter()
    await way(client)
    await metrics.wait_for(*map(int, levels))
    took = time.perf_counter() - started
    await client.close()
    await metrics.close()
    return took * 1e3


async def measure_outside(url: str, repeat: int) -> None:
    parts = urlsplit(url)
    connect_ = partial(connect, (parts.hostname or "127.0.0.1", parts.port or 80))
    sum_and_count = (b"abort_to_free_seconds_sum", b"abort_to_free_seconds_count")
    seconds_before, count_before = await Metrics(await connect_()).read(*sum_and_count)
    print_head(url, WAYS)

    async def measure(name: str, moment: Any) -> None:
        times = [
            [await time_of_one_outside(connect_, moment, way) for _ in range(repeat)] for way in WAYS.values()
        ]
        print_row(name, times)

    await measure("its prompt is computed", prefilling)
    await measure("mid-stream", mid_stream)
    await measure("a write is blocked", write_blocked)
    metrics, occupant, second = Metrics(await connect_()), await connect_(), await connect_()
    await complete(occupant)
    await metrics.wait_for(1, 0)
    await complete(second)
    await trio.sleep(0.5)
    is_full = await metrics.levels() == [1, 1]
    await second.close()
    if is_full:
        await metrics.wait_for(1, 0)
        await measure("it waits in the queue", queued)
    await occupant.close()
    seconds, count = await Metrics(await connect_()).read(*sum_and_count)
    if count > count_before:
        mean = (seconds - seconds_before) / (count - count_before) * 1e3
        print(
            f"\nAbort to free blocks, by the server: {mean:.1f} ms on average of {count - count_before:.0f}."
        )


def print_head(title: str, ways: dict[str, Way]) -> None:
    print(f"\n| {title} | {' | '.join(ways)} |\n|---|{'---|' * len(ways)}", flush=True)


def print_row(name: str, cells: list[list[float]]) -> None:
    texts = [f"{statistics.median(times):.2f} / {max(times):.2f}" for times in cells]
    print(f"| {name} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a running server, instead of one in this process")
    parser.add_argument("--repeat", type=int, default=20, help="times per cell")
    args = parser.parse_args()
    if args.url:
        trio.run(measure_outside, args.url, args.repeat)
    else:
        gc.collect()
        gc.freeze()  # as `trioserve serve` does once it is ready
        trio.run(measure_in_process, args.repeat)
