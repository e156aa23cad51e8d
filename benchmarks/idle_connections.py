"""What idle keep-alive connections cost: latency of others, and memory.

python benchmarks/idle_connections.py [--connections 10000] [--rounds 3] [serve flags]

Starts `trioserve serve`, and measures short chats, one after the other, in turn without and with so many
connections that have had one answer each and then say nothing. Prints a Markdown table. Loopback only; Linux
only; needs as many file descriptors, and raises its limit to the hard one.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import statistics
import sys
import time
import urllib.request
from contextlib import ExitStack

from soak_watch import sample

from served import serve

NUM_CHATS = 40
CHAT = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}


def chat_milliseconds(port: int) -> list[float]:
    found = []
    for _ in range(NUM_CHATS):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(CHAT).encode(),
            {"Content-Type": "application/json"},
        )
        started = time.perf_counter()
        with urllib.request.urlopen(request) as response:
            response.read()
        found.append((time.perf_counter() - started) * 1e3)
    return found


def open_idle(port: int, number: int, stack: ExitStack) -> None:
    for _ in range(number):
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: idle\r\n\r\n")
        if not connection.recv(4096).startswith(b"HTTP/1.1 200"):
            raise SystemExit("a connection was not served")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options, flags = parser.parse_known_args(arguments)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(
        "| idle connections | chat p50, ms | p99, ms | memory of the server process, MiB |\n|---|---|---|---|"
    )
    with serve(["--log.access", "false", "--keep-alive-timeout", "3600", *flags]) as served:
        pid, port = served.process.pid, served.port
        chat_milliseconds(port)
        before = sample(pid).rss_mib
        for _ in range(options.rounds):
            report(0, chat_milliseconds(port), sample(pid).rss_mib)
            with ExitStack() as stack:
                open_idle(port, options.connections, stack)
                report(options.connections, chat_milliseconds(port), sample(pid).rss_mib)
                held = sample(pid).rss_mib - before
    print(f"\n{held * 1024 / options.connections:.1f} KiB per idle connection.")


def report(connections: int, milliseconds: list[float], rss_mib: float) -> None:
    p50, p99 = statistics.median(milliseconds), sorted(milliseconds)[int(len(milliseconds) * 0.99)]
    print(f"| {connections} | {p50:.1f} | {p99:.1f} | {rss_mib:.0f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
