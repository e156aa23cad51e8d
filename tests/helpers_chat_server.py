"""A scripted server with the OpenAI API, and a terminal whose user is a script."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

INTERRUPT = "^C"
"""As a line of input: Ctrl-C at the prompt."""


class Terminal:
    """Takes the place of stdin and stdout: what is typed, and what is shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lines: list[str], *, is_tty: bool = True) -> None:
        self.shown = _Screen()
        monkeypatch.setattr("sys.stdin", _Keyboard(lines, is_tty))
        monkeypatch.setattr("sys.stdout", self.shown)


class _Keyboard(io.StringIO):
    def __init__(self, lines: list[str], is_tty: bool) -> None:
        super().__init__("".join(line + "\n" for line in lines))
        self._is_tty = is_tty

    def isatty(self) -> bool:
        return self._is_tty

    def readline(self, size: int | None = -1) -> str:
        line = super().readline(-1)
        if line == INTERRUPT + "\n":
            raise KeyboardInterrupt
        return line


class _Screen(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.partial_shown = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if "partial" in text:
            self.partial_shown.set()
        return written


class ChatServer(ThreadingHTTPServer):
    """The last message (or the prompt) says what happens; see `_Handler._answer`."""

    daemon_threads = False
    block_on_close = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models = ["first-model", "second-model"]
        self.screen: _Screen | None = None
        self.client_left = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        self._reply(200, {"object": "list", "data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({"path": self.path, **body})
        self.server.keys.append(self.headers["Authorization"])
        text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        self._answer(text)

    def _answer(self, text: str) -> None:
        match text:
            case "refuse":
                self._reply(404, {"error": {"message": "there is\nno such model", "type": "NotFoundError"}})
            case "fall over":
                self._reply(500, "plain words", "text/plain")
            case "talk html":
                self._reply(200, "<html>", "text/html")
            case "talk nonsense":
                self._stream_text("{not json}")
            case "fail midway":
                self._stream(["partial"], end={"error": {"message": "the engine died"}})
            case "break off":
                self._stream(["partial"], end=None)
            case "finish without done":
                self._stream(["fine"], end={"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            case "take forever":
                self._stream(["partial"], end=None)
                self._interrupt_the_reader()
            case _:
                self._stream([f"<{text}", ">"], end="[DONE]")

    def _interrupt_the_reader(self) -> None:
        assert self.server.screen is not None
        self.server.screen.partial_shown.wait(10)
        self.connection.settimeout(1)
        for _ in range(10):  # a signal just before the reader's system call does not end that
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                if self.connection.recv(1) == b"":
                    self.server.client_left.set()
                return

    def _reply(self, status: int, body: Any, kind: str = "application/json") -> None:
        payload = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _stream(self, pieces: list[str], end: Any) -> None:
        events: list[Any] = [{"choices": []}, {"choices": [{"index": 1, "delta": {"content": "of another"}}]}]
        events += [
            {"choices": [{"index": 0, "delta": {"content": piece}, "text": piece, "finish_reason": None}]}
            for piece in pieces
        ]
        events += [] if end is None else [end]
        self._stream_text(*(event if isinstance(event, str) else json.dumps(event) for event in events))

    def _stream_text(self, *events: str) -> None:
        """Without a length: HTTP/1.0's end of the body is the end of the connection."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        self.wfile.write(b": a comment\n\n")
        for event in events:
            self.wfile.write(f"data: {event}\n\n".encode())


@contextmanager
def running_chat_server() -> Iterator[ChatServer]:
    with ChatServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
