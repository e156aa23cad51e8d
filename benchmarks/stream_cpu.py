"""CPU time of the API process per streamed token.

    python benchmarks/stream_cpu.py [--streams 32] [--repeat 3] [--model smollm2-135m]
    python benchmarks/stream_cpu.py --url http://127.0.0.1:8000 --pid 1234 --model NAME

The real server over real sockets: user and system time of its process (not of its engine's) over a stretch in
which all streams give tokens, divided by the tokens of that stretch. With the real engine core, and with one
that is faster than any model (`paced_engine.py`: a token for every stream each `--step-ms`), which shows the
path at speed. With a URL: any server of OpenAI's API, of which `--pid` is the process to be looked at.

`chunks/token` is counted over the whole of all streams: 1.00 if every token came in an event of its own, less
if tokens were merged. `writes/token` are HTTP chunks. Each row is a median of the repetitions.
Prints a Markdown table, and then the rows as JSON, one to a line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import socket
import statistics
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import attrs

from served import serve

if TYPE_CHECKING:
    from collections.abc import Iterator

_HERE = Path(__file__).parent
_TICKS = os.sysconf("SC_CLK_TCK")
_PROMPT = "Request {number}. Write a story about a river, a stone, the light, a cloud and an engine."
_ROUTES = ("completions", "chat/completions")
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_PATIENCE = 120.0
"""Seconds without a byte from any stream."""


@attrs.define
class Stream:
    """One streamed answer, of which only what is measured is looked at."""

    socket: socket.socket
    num_events: int = 0
    num_writes: int = 0
    num_tokens: int = 0
    """As the server says at the end."""
    last_bytes: bytes = b""

    def receive(self) -> bool:
        """Take what is there; whether more will come."""
        data = self.socket.recv(1 << 18)
        self.num_events += (self.last_bytes[-1:] + data).count(b"\n\n")
        self.num_writes += data.count(b"\n\n\r\n")
        self.last_bytes = (self.last_bytes + data)[-2000:]
        if b"data: [DONE]" in self.last_bytes[-40:] or not data:
            self._read_usage()
            return False
        return True

    def _read_usage(self) -> None:
        *_, num_tokens = _COMPLETION_TOKENS.findall(self.last_bytes)
        self.num_tokens = int(num_tokens)


@attrs.frozen(kw_only=True)
class Times:
    """Seconds of a process so far."""

    total: float
    user: float
    """As coarse as the kernel's ticks."""
    system: float

    @classmethod
    def of(cls, pid: int) -> Times:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return cls(
            total=time.clock_gettime((~pid << 3) | 2),  # Linux: the clock of a process's CPU time
            user=int(fields[11]) / _TICKS,
            system=int(fields[12]) / _TICKS,
        )


@attrs.frozen(kw_only=True)
class Stretch:
    """What was measured once."""

    us_per_token: float
    system_share: float
    chunks_per_token: float
    writes_per_token: float
    tokens_per_second: float


@attrs.frozen(kw_only=True)
class Target:
    """A server, and how it is asked."""

    host: str
    port: int
    pid: int
    model: str


def open_stream(target: Target, route: str, number: int, num_tokens: int) -> Stream:
    prompt = _PROMPT.format(number=number)
    messages = [{"role": "user", "content": prompt}]
    asked = {"prompt": prompt} if route == "completions" else {"messages": messages}
    body = {
        "model": target.model,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **asked,
    }
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/{route} HTTP/1.1\r\nHost: {target.host}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    sock = socket.create_connection((target.host, target.port))
    sock.sendall(head.encode() + data)
    return Stream(sock)


def measure(target: Target, route: str, num_streams: int, num_tokens: int) -> Stretch:
    """From when every stream has given a tenth of its tokens to when one has given nine tenths, or has ended
    (after fewer events, if tokens were merged)."""
    streams = [open_stream(target, route, number, num_tokens) for number in range(num_streams)]
    begin = end = None
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            ready = selector.select(_PATIENCE)
            assert ready, "the streams stand still"
            for key, _ in ready:
                if not key.data.receive():
                    end = end or _look(target, streams)
                    selector.unregister(key.data.socket)
                    key.data.socket.close()
            if begin is None:
                if min(stream.num_events for stream in streams) > num_tokens / 10:
                    begin = _look(target, streams)
            elif end is None and max(stream.num_events for stream in streams) > num_tokens * 0.9:
                end = _look(target, streams)
    assert begin is not None, "the streams did not run side by side"
    assert end is not None
    return _stretch(begin, end, streams, 2 if route == "completions" else 3)


def _look(target: Target, streams: list[Stream]) -> tuple[float, int, Times]:
    return time.perf_counter(), sum(stream.num_events for stream in streams), Times.of(target.pid)


def _stretch(
    begin: tuple[float, int, Times], end: tuple[float, int, Times], streams: list[Stream], num_extra: int
) -> Stretch:
    """`num_extra` events of each stream carry no token: a role, the usage, the end."""
    num_events = sum(stream.num_events - num_extra for stream in streams)
    num_tokens = sum(stream.num_tokens for stream in streams)
    chunks_per_token = num_events / num_tokens
    tokens = (end[1] - begin[1]) / chunks_per_token
    seconds = end[2].total - begin[2].total
    ticks = (end[2].user - begin[2].user) + (end[2].system - begin[2].system)
    return Stretch(
        us_per_token=seconds / tokens * 1e6,
        system_share=(end[2].system - begin[2].system) / ticks if ticks else 0.0,
        chunks_per_token=chunks_per_token,
        writes_per_token=sum(stream.num_writes - num_extra for stream in streams) / num_tokens,
        tokens_per_second=tokens / (end[0] - begin[0]),
    )


@contextmanager
def real_engine(args: argparse.Namespace) -> Iterator[Target]:
    with serve(["--model", args.model, "--no-log.access"]) as served:
        yield Target(host="127.0.0.1", port=served.port, pid=served.process.pid, model=served.model)


@contextmanager
def paced_engine(args: argparse.Namespace) -> Iterator[Target]:
    os.environ["PACED_STEP_MS"] = str(args.step_ms)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(_HERE)]))
    flags = ["--model", args.model, "--no-log.access", "--max-num-seqs", str(max(256, args.streams))]
    with serve(flags, program=[str(_HERE / "paced_engine.py")]) as served:
        yield Target(host="127.0.0.1", port=served.port, pid=served.process.pid, model=served.model)


@contextmanager
def given_server(args: argparse.Namespace) -> Iterator[Target]:
    url = urlsplit(args.url)
    yield Target(host=url.hostname or "127.0.0.1", port=url.port or 80, pid=args.pid, model=args.model)


def rows(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    engines = [("given", given_server, args.num_tokens or 1000)]
    if args.url is None:
        engines = [
            ("paced", paced_engine, args.num_tokens or 1000),
            ("smollm2", real_engine, args.num_tokens or 128),
        ]
    for name, opened, num_tokens in engines:
        if name not in args.engines and args.url is None:
            continue
        with opened(args) as target:
            for route in args.routes:
                measure(target, route, args.streams, 64)  # what is only done once
            found: dict[str, list[Stretch]] = {route: [] for route in args.routes}
            for _ in range(args.repeat):
                for route in args.routes:
                    found[route].append(measure(target, route, args.streams, num_tokens))
            for route, stretches in found.items():
                yield {"engine": name, "route": route, "streams": args.streams, **_medians(stretches)}


def _medians(stretches: list[Stretch]) -> dict[str, object]:
    names = [field.name for field in attrs.fields(Stretch)]
    medians = {
        name: round(statistics.median(getattr(stretch, name) for stretch in stretches), 2) for name in names
    }
    return {**medians, "all_us_per_token": [round(stretch.us_per_token, 1) for stretch in stretches]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, help="of each stream; by default as many as take seconds")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engines", nargs="+", default=["paced", "smollm2"], choices=["paced", "smollm2"])
    parser.add_argument("--routes", nargs="+", default=list(_ROUTES), choices=_ROUTES)
    parser.add_argument("--url")
    parser.add_argument("--pid", type=int)
    args = parser.parse_args()
    print("| engine | route | us/token | in the kernel | chunks/token | writes/token | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    measured = list(rows(args))
    for row in measured:
        print(
            f"| {row['engine']} | {row['route']} | {row['us_per_token']:.1f} | {row['system_share']:.0%} "
            f"| {row['chunks_per_token']:.2f} | {row['writes_per_token']:.2f} "
            f"| {row['tokens_per_second']:.0f} |"
        )
    print()
    for row in measured:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
