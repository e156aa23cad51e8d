"""Clients as the field has them: they leave at any moment, read byte by byte, and look at what is left."""

from __future__ import annotations

import gc
import http.client
import io
import json
import socket
import struct
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import wait_all_tasks_blocked

from served import MODEL, ServedModel, wait_for
from trioserve.frontend.channel import OutputChannel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trioserve import AsyncLLM

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}
FOREVER: dict[str, Any] = {"model": MODEL, "prompt": "Tell me", "max_tokens": 4000, "ignore_eos": True}
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds


# Requests


@contextmanager
def openai_client(server: ServedModel, api_key: str = "none") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=api_key, max_retries=0) as client:
        yield client


def http_request(path: str, body: Any, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "host: test",
        "content-type: application/json",
        f"content-length: {len(data)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


class Caller:
    """A client on a socket of its own, which reads no more than it is told to, and can leave at any time."""

    def __init__(self, server: ServedModel, path: str, body: Any, *headers: str) -> None:
        self.received = b""
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self._socket.sendall(http_request(path, body, "connection: close", *headers))

    def read_until(self, mark: bytes) -> None:
        while mark not in self.received:
            data = self._socket.recv(65536)
            assert data, self.received
            self.received += data

    def read_to_end(self) -> tuple[int, str]:
        """The status and the body."""
        while data := self._socket.recv(65536):
            self.received += data
        self._socket.close()
        response = http.client.HTTPResponse(_Recorded(self.received))  # type: ignore[arg-type]
        response.begin()
        return response.status, response.read().decode()

    def leave(self, *, by_reset: bool = False) -> None:
        if by_reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._socket.close()


class _Recorded:
    """What `http.client` wants of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def ask_together(server: ServedModel, *asked: tuple[str, dict[str, Any]]) -> list[Any]:
    """The answers to many requests (path, body) that run side by side: a stream's events, or the JSON."""
    callers = [Caller(server, path, {**GREEDY, **body}) for path, body in asked]
    answers = []
    for caller, (_, body) in zip(callers, asked, strict=True):
        status, text = caller.read_to_end()
        assert status == 200, text
        answers.append(parse_events(text) if body.get("stream") else json.loads(text))
    return answers


def parse_events(text: str) -> list[Any]:
    """Of a whole stream: the decoded events, and comments and "[DONE]" as they are."""
    frames = text.split("\n\n")
    assert frames.pop() == "", "the stream ends within an event"
    texts = [frame.removeprefix("data: ") for frame in frames]
    return [json.loads(text) if text.startswith("{") else text for text in texts]


def stream_events(server: ServedModel, path: str, **fields: Any) -> list[Any]:
    status, text = server.request("POST", path, {**GREEDY, "stream": True, **fields})
    assert status == 200, text
    return parse_events(text)


def choices_of(events: list[Any], index: int = 0) -> list[Any]:
    """What a stream said of one choice."""
    choices = [choice for event in events if isinstance(event, dict) for choice in event.get("choices", ())]
    return [choice for choice in choices if choice["index"] == index]


def text_of(events: list[Any], index: int = 0) -> str:
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for choice in choices_of(events, index)
    )


# What is left


def metric(text: str, name: str, **labels: str) -> float:
    """The sum over the samples that have these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"trioserve:{name}" and labels.items() <= sample.labels.items()
    )


def metric_of(source: ServedModel | AsyncLLM, name: str, **labels: str) -> float:
    text = source.request("GET", "/metrics")[1] if isinstance(source, ServedModel) else None
    return metric(text or source.metrics.render().decode(), name, **labels)  # type: ignore[union-attr]


def num_aborted(source: ServedModel | AsyncLLM) -> float:
    return metric_of(source, "request_success_total", finished_reason="abort")


def levels(source: ServedModel | AsyncLLM) -> tuple[float, ...]:
    """Running, waiting, and the part of the blocks that is held."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return tuple(metric_of(source, name) for name in names)


def num_fds(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def wait_until_running(server: ServedModel, number: int) -> None:
    wait_for(lambda: server.metric("num_requests_running") >= number)


async def until(is_true: Callable[[], object]) -> None:
    """Of what tasks of this process bring about."""
    with trio.fail_after(20):
        while not is_true():
            await wait_all_tasks_blocked()


def channels_in_memory(name: str) -> int:
    """Requests of that name of which anything still knows, in this process."""
    gc.collect()
    # not isinstance, which wakes every lazy module and proxy of the process
    found = [item for item in gc.get_objects() if type(item) is OutputChannel]
    return sum(name in channel.request_id for channel in found)
