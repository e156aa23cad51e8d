"""Other people's clients against a real server: each in an environment of its own, with pinned versions.

python benchmarks/clients.py [NAME ...] [--fast] [--cache DIR] [--dtype DTYPE]

NAME is a folder of tests/clients; without one, all are run. --fast runs some that together take little time,
and need no Node. Environments are made under --cache where they are
missing or their pins have changed; that needs a package index, all else stays on the loopback interface.
Prints each client's tests as they run and a Markdown table at the end; the exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from client_environments import Client, all_clients

from served import serve

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from served import Served

KEY = "sk-clients"

SERVERS = {
    "TEXT": "smollm2-135m",
    "TOOLS": "qwen2.5-coder-0.5b",
    "EMBEDDINGS": "minilm-l6",
    "SPEECH": "whisper-tiny.en",
}

ASKED_BY = {
    "EMBEDDINGS": {"openai_python", "langchain_standard", "litellm_python", "cohere_python"},
    "SPEECH": {"openai_python"},
}
"""Servers that are only there for some clients."""

FLAGS = ("--kv-cache-memory", "1GiB", "--api-key", KEY, "--log.access", "false")

FAST = {"anthropic_python", "huggingface", "instructor_python", "openresponses"}
"""What takes two minutes on two cores. The tests proper have much of `openai_python`."""


@attrs.frozen
class Result:
    client: Client
    install: float | None
    """Seconds; None: it was there."""
    tests: float
    """Seconds."""
    passed: bool


def main() -> int:
    arguments = parse()
    clients = chosen(arguments)
    installed = [install(client, arguments.cache) for client in clients]
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(serve(flags_of(SERVERS[name], arguments)))
            for name in servers_for({client.name for client in clients})
        }
        environment = environment_of(servers)
        results = [
            run(client, seconds, arguments, environment)
            for client, seconds in zip(clients, installed, strict=True)
        ]
        troubled = [server.model for server in servers.values() if "Traceback" in server.log]
    print(table(results))
    for model in troubled:
        print(f"\nThe server of {model} has logged an error.")
    return int(bool(troubled) or not all(result.passed for result in results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", nargs="*", help=f"of {', '.join(all_clients())}", metavar="NAME")
    parser.add_argument("--fast", action="store_true", help="a selection that takes little time")
    parser.add_argument(
        "--dtype", default="float32", help="of the servers: auto, bfloat16 or float32 [%(default)s]"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path("~/.cache/trioserve-clients").expanduser(),
        help="folder of the environments [%(default)s]",
    )
    return parser.parse_args()


def chosen(arguments: argparse.Namespace) -> list[Client]:
    clients = all_clients()
    if unknown := set(arguments.name) - set(clients):
        raise SystemExit(f"{', '.join(sorted(unknown))}: there is {', '.join(clients)}")
    if arguments.name:
        return [clients[name] for name in arguments.name]
    if arguments.fast:
        return [clients[name] for name in sorted(FAST)]
    return list(clients.values())


def install(client: Client, cache: Path) -> float | None:
    """Seconds that it took; None if it was there."""
    if client.is_installed(cache):
        return None
    print(f"\n== installing {client.name}", flush=True)
    began = time.perf_counter()
    client.install(cache)
    return time.perf_counter() - began


def servers_for(clients: set[str]) -> list[str]:
    return [name for name in SERVERS if ASKED_BY.get(name, clients) & clients]


def flags_of(model: str, arguments: argparse.Namespace) -> list[str]:
    return ["--model", model, "--dtype", arguments.dtype, *FLAGS]


def environment_of(servers: Mapping[str, Served]) -> dict[str, str]:
    """What the tests find them by."""
    environment = {"TRIOSERVE_CLIENTS_KEY": KEY, "TRIOSERVE_PYTHON": sys.executable}
    for name, server in servers.items():
        environment[f"TRIOSERVE_{name}_URL"] = f"http://127.0.0.1:{server.port}"
        environment[f"TRIOSERVE_{name}_MODEL"] = server.model
    return environment


def run(
    client: Client, installed: float | None, arguments: argparse.Namespace, environment: Mapping[str, str]
) -> Result:
    print(f"\n== {client.name}: {', '.join(client.versions)}", flush=True)
    began = time.perf_counter()
    command = client.command(arguments.cache)
    done = subprocess.run(command, env={**os.environ, **environment}, check=False)
    return Result(client, installed, time.perf_counter() - began, done.returncode == 0)


def table(results: Iterable[Result]) -> str:
    rows = ["", "| client | versions | install, s | tests, s | |", "|---|---|---|---|---|"]
    for result in results:
        installed = "-" if result.install is None else f"{result.install:.0f}"
        word = "passed" if result.passed else "FAILED"
        versions = ", ".join(result.client.versions)
        rows.append(f"| {result.client.name} | {versions} | {installed} | {result.tests:.0f} | {word} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
