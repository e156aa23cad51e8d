"""A client of any server of OpenAI's API, that measures streams and takes little of the processors itself.

One process, one thread, plain sockets; of the events only their number and time are looked at.
"""

from __future__ import annotations

import itertools
import json
import re
import selectors
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Answer", "Load", "Target", "percentile", "run_load"]

_EVENT = b"data: {"
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_TAIL = 4000
"""Bytes of an answer that are kept: its last events."""
_PATIENCE = 300.0
"""Seconds without a byte from any stream."""


@attrs.frozen(kw_only=True)
class Target:
    """A server, and what it calls its model."""

    host: str
    port: int
    model: str


@attrs.frozen(kw_only=True)
class Answer:
    """Times in seconds."""

    first_token: float
    gaps: list[float]
    """Between events."""
    last_token: float
    num_tokens: int

    @property
    def decode_rate(self) -> float:
        """Tokens per second from the first to the last."""
        return (self.num_tokens - 1) / (self.last_token - self.first_token)


@attrs.frozen(kw_only=True)
class Load:
    """What some requests showed together."""

    answers: list[Answer]
    seconds: float
    client_cpu_seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def first_tokens(self) -> list[float]:
        return [answer.first_token for answer in self.answers]

    @property
    def gaps(self) -> list[float]:
        return [gap for answer in self.answers for gap in answer.gaps]

    @property
    def events_per_token(self) -> float:
        """Less than 1 if the server joins tokens that wait."""
        return (len(self.gaps) + len(self.answers)) / self.num_tokens


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def run_load(target: Target, bodies: Iterable[Mapping[str, Any]], concurrency: int) -> Load:
    """Send each body to /v1/completions, streaming, `concurrency` at a time; until all are answered.

    Raises SystemExit: an answer is an error, or has other than `max_tokens` tokens.
    """
    waiting = deque(_request(target, body) for body in bodies)
    streams: list[_Stream] = []
    with selectors.DefaultSelector() as selector:
        began, cpu_began = time.perf_counter(), time.process_time()
        try:
            while waiting or selector.get_map():
                while waiting and len(selector.get_map()) < concurrency:
                    stream = _Stream.open(target, *waiting.popleft())
                    selector.register(stream.socket, selectors.EVENT_READ, stream)
                    streams.append(stream)
                _receive(selector)
        finally:
            for key in selector.get_map().values():
                key.data.socket.close()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return Load(
        answers=[stream.answer() for stream in streams], seconds=seconds, client_cpu_seconds=cpu_seconds
    )


def _receive(selector: selectors.BaseSelector) -> None:
    ready = selector.select(_PATIENCE)
    if not ready:
        raise SystemExit(f"no stream has given a byte for {_PATIENCE:.0f} s")
    for key, _ in ready:
        if not key.data.receive():
            selector.unregister(key.data.socket)
            key.data.socket.close()


def _request(target: Target, body: Mapping[str, Any]) -> tuple[bytes, int]:
    """The bytes to be sent, and how many tokens are asked for."""
    fixed = {
        "model": target.model,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps({**fixed, **body}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {target.host}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data, body["max_tokens"]


@attrs.define
class _Stream:
    socket: socket.socket
    sent: float
    max_tokens: int
    arrivals: list[float] = attrs.field(factory=list)
    """Of each event."""
    tail: bytes = b""

    @classmethod
    def open(cls, target: Target, request: bytes, max_tokens: int) -> _Stream:
        sent = time.perf_counter()
        sock = socket.create_connection((target.host, target.port))
        sock.sendall(request)
        return cls(sock, sent, max_tokens)

    def receive(self) -> bool:
        """Take what is there; whether more will come."""
        data = self.socket.recv(1 << 18)
        now = time.perf_counter()
        num_events = (self.tail[1 - len(_EVENT) :] + data).count(_EVENT)
        self.arrivals.extend([now] * num_events)
        self.tail = (self.tail + data)[-_TAIL:]
        return bool(data) and b"data: [DONE]" not in self.tail[-40:]

    def answer(self) -> Answer:
        counts = _COMPLETION_TOKENS.findall(self.tail)
        if not counts or int(counts[-1]) != self.max_tokens:
            raise SystemExit(f"an answer without its {self.max_tokens} tokens: ...{self.tail.decode()}")
        # The last event is the usage; one before it may carry no token but the reason of the end.
        arrivals = self.arrivals[: min(self.max_tokens, len(self.arrivals) - 1)]
        return Answer(
            first_token=arrivals[0] - self.sent,
            gaps=[later - earlier for earlier, later in itertools.pairwise(arrivals)],
            last_token=arrivals[-1] - self.sent,
            num_tokens=self.max_tokens,
        )
