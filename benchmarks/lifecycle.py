"""How long a server takes to start, and how fast each side notices the other's end.

python benchmarks/lifecycle.py [serve flags]

Starts `trioserve serve` several times on a free port and prints one JSON line per measure, times in
milliseconds (start in seconds). Linux only.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from served import serve

if TYPE_CHECKING:
    from collections.abc import Callable

STREAMS = 8


def wait_for(condition: Callable[[], Any], seconds: float = 10) -> Any:
    deadline = time.perf_counter() + seconds
    while not (found := condition()):
        if time.perf_counter() > deadline:
            raise TimeoutError
        time.sleep(0.0005)
    return found


def child_of(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text())


def is_gone(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def open_streams(model: str, port: int) -> list[http.client.HTTPResponse]:
    """Long streaming completions, of which the first token has come."""
    body = {"model": model, "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    connections = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(STREAMS)]
    for connection in connections:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    responses = [connection.getresponse() for connection in connections]
    for response in responses:
        response.readline()
    return responses


def milliseconds_until_streams_end(responses: list[http.client.HTTPResponse], started: float) -> float:
    for response in responses:
        response.read()
    return (time.perf_counter() - started) * 1e3


def report(what: str, **figures: float | int) -> None:
    print(
        json.dumps({"what": what, **{name: round(value, 1) for name, value in figures.items()}}), flush=True
    )


def main(flags: list[str]) -> None:
    for _ in range(3):
        with serve(flags) as served:
            process = served.process
            open_streams(served.model, served.port)
            engine = child_of(process.pid)
            status = (Path("/proc") / str(process.pid) / "status").read_text()
            resident = int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) / 1024  # type: ignore[union-attr]
            report("start", seconds=served.seconds, api_process_mib=resident)
            started = time.perf_counter()
            process.kill()
            wait_for(lambda engine=engine: is_gone(engine))
            report("server killed: engine gone", ms=(time.perf_counter() - started) * 1e3)
        with serve(flags) as served:
            process = served.process
            responses = open_streams(served.model, served.port)
            started = time.perf_counter()
            os.kill(child_of(process.pid), signal.SIGKILL)
            ms = milliseconds_until_streams_end(responses, started)
            exit_code = process.wait()
            report("engine killed: all streams ended", ms=ms, streams=STREAMS, exit_code=exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])
