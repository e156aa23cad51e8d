"""trioserve, vLLM and llama.cpp on this machine: each served in turn, the same load from the same client.

    python benchmarks/compare.py results.json --hf DIR --gguf-bf16 FILE --gguf-q8-0 FILE --gguf-q4-1 FILE \\
        --vllm-python VENV/bin/python --llama-server PATH
    python benchmarks/compare.py results.json --rounds 0

DIR is a Hugging Face directory of SmolLM2-135M in bfloat16; the GGUF files are made of it. What is left
out is not measured: without --vllm-python there is no vLLM. Every round starts every server once, in turn, so
that what else happens on the machine strikes all of them. Precisions: bf16; int8 (llama.cpp and ours from the
same Q8_0 file, and ours from DIR with --quantization int8); 4bit (both from the same Q4_1 file).

Loads, streaming over HTTP, greedy: 20 words in and 128 tokens out at 1, 8 and 32 streams, twice as many
requests as streams (4 for one); 8 prompts of 1,024 tokens at once, for one token each; two requests one after
the other that share 1,000 tokens. Then the memory of all processes. Starts are warm if the models have been
read before; with --cold, each round starts every server once without any file in memory, for its start alone.

Prints tables, with the ratio to the better of the peers. `results.json` has the machine, versions, commands
and every run; runs are added to a file that is there, so a measurement may be made in pieces. With --rounds
0, its tables are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compare_loads import LOADS, warm_up
from compare_table import tables
from machine import describe_machine, git_commit
from peers import llama_cpp, running, trioserve, vllm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from peers import Peer

PRECISIONS = ("bf16", "int8", "4bit")
SERVERS = ("trioserve", "vLLM", "llama.cpp")
_REST = 3.0
"""Seconds, for what a server still does when it says that it is ready."""


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # not without ending the server
    args = parse()
    results = read_results(args.results)
    peers = [(precision, peer) for precision in args.precisions for peer in chosen(args, precision)]
    for number in range(args.rounds):
        for precision, peer in peers:
            run = start_cold(peer, number) if args.cold else measure(peer, args.loads, number)
            results["runs"].append({"precision": precision, "server": peer.name, **run})
            results["servers"][f"{precision} {peer.name}"] = describe(peer)
            args.results.write_text(json.dumps(results, indent=1) + "\n")
            print(json.dumps(summary(results["runs"][-1])), flush=True)
    print(tables(results["runs"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON file; runs are added to it")
    parser.add_argument("--hf", help="model directory in bfloat16")
    parser.add_argument("--gguf-bf16")
    parser.add_argument("--gguf-q8-0")
    parser.add_argument("--gguf-q4-1")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM")
    parser.add_argument("--llama-server", help="llama.cpp's server")
    parser.add_argument("--llama-server-bf16", help="another build of it for bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of llama.cpp")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--servers", nargs="+", default=SERVERS, choices=SERVERS)
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--cold", action="store_true", help="starts only, files not cached; needs root")
    parser.add_argument("--trioserve-flags", default="", help="further ones, in one word")
    return parser.parse_args()


def chosen(args: argparse.Namespace, precision: str) -> list[Peer]:
    """The servers of a precision for which there is a model and a program."""
    return [peer for peer in possible(args, precision) if peer.name.split()[0] in args.servers]


def possible(args: argparse.Namespace, precision: str) -> Iterator[Peer]:
    flags = args.trioserve_flags.split()
    if precision == "bf16":
        if args.hf:
            yield trioserve("trioserve", args.hf, ["--dtype", "bfloat16", "--quantization", "none", *flags])
            if args.vllm_python:
                yield vllm(args.vllm_python, args.hf)
        if args.gguf_bf16 and (program := args.llama_server_bf16 or args.llama_server):
            yield llama_cpp(program, args.gguf_bf16, args.threads)
        return
    file = args.gguf_q8_0 if precision == "int8" else args.gguf_q4_1
    if file:
        yield trioserve("trioserve", file, flags)
        if args.llama_server:
            yield llama_cpp(args.llama_server, file, args.threads)
    if precision == "int8" and args.hf:
        yield trioserve("trioserve int8", args.hf, ["--quantization", "int8", *flags])


def measure(peer: Peer, loads: Sequence[str], round_number: int) -> dict[str, Any]:
    """One start of the server, with every load."""
    began = beginning(round_number)
    with running(peer) as server:
        time.sleep(_REST)
        warm_up(server.target)
        # Every start has prompts of its own: a server may keep caches, and files may be added to.
        seed = time.time_ns()
        measured = {name: LOADS[name](server.target, seed) for name in loads}
        return {**began, "ready_seconds": server.ready, **measured, "memory_mib": server.memory_mib()}


def start_cold(peer: Peer, round_number: int) -> dict[str, Any]:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    with running(peer) as server:
        return {**beginning(round_number), "cold_ready_seconds": server.ready}


def beginning(round_number: int) -> dict[str, Any]:
    return {
        "round": round_number,
        "at": time.strftime("%Y-%m-%d %H:%M:%S"),
        "load_average": os.getloadavg()[0],
    }


def describe(peer: Peer) -> dict[str, object]:
    return {
        "version": peer.version(),
        "command": " ".join(peer.command),
        "environment": dict(peer.environment),
        "measured": git_commit() if peer.name.startswith("trioserve") else None,
    }


def read_results(path: Path) -> dict[str, Any]:
    if path.exists():
        results: dict[str, Any] = json.loads(path.read_text())
        return results
    return {"machine": describe_machine(), "servers": {}, "runs": []}


def summary(run: dict[str, Any]) -> dict[str, object]:
    """Without what fills a screen."""
    return {
        key: {name: round(number, 2) for name, number in value.items() if not isinstance(number, list)}
        if isinstance(value, dict)
        else value
        for key, value in run.items()
    }


if __name__ == "__main__":
    main()
