"""`trioserve serve` as a user runs it: a child process, found by the line it logs."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trioserve_kernels.native import available_tiers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODEL = "smollm2-135m"
STEADY = "auto" if available_tiers() else "float32"
"""A dtype in which greedy and seeded answers are the same whatever runs beside them: with our kernels any.
With torch, in bfloat16, two tokens of nearly the same probability may change places with the batch."""
_START_TIMEOUT = 120
_READY = re.compile(r"serving \S+ on (?:http://[0-9.]+:(\d+)|unix:(\S+))")


@attrs.define(eq=False)
class ServedModel:
    """A running server."""

    process: subprocess.Popen[str]
    log_path: Path
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def engine_pid(self) -> int:
        (pid,) = children_of(self.process.pid)
        return pid

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status, and the JSON (or text) of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        is_json = (response.getheader("Content-Type") or "").startswith("application/json")
        return response.status, json.loads(text) if is_json and text else text

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        _, text = self.request("GET", "/metrics")
        pattern = rf"^trioserve:{name}(?:{{[^}}]*}})? (\S+)$"
        return sum(float(match) for match in re.findall(pattern, text, re.MULTILINE))

    def wait_until_idle(self) -> None:
        """Until nothing runs or waits, and no block is held."""
        levels = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_for(lambda: not any(map(self.metric, levels)))

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def wait_for(condition: Any, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    try:
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except FileNotFoundError:
        return []


def is_running(pid: int) -> bool:
    """False for a zombie too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def served(
    directory: Path, flags: Sequence[str] = (), environment: dict[str, str] | None = None
) -> Iterator[ServedModel]:
    """A server on a free port, that is ready; it is killed on leaving if it still runs."""
    log_path = directory / "serve.log"
    command = [sys.executable, "-m", "trioserve", "serve", "--port", "0", "--threads", "1", *flags]
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, text=True, env={**os.environ, **(environment or {})}
        )
    server = ServedModel(process, log_path)
    try:
        wait_for(lambda: _READY.search(server.log) or process.poll() is not None, _START_TIMEOUT)
        ready = _READY.search(server.log)
        assert ready is not None, server.log
        server.port = int(ready.group(1) or 0)
        yield server
    finally:
        engines = children_of(process.pid)
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(is_running, engines)))
