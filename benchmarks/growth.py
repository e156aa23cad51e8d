"""How the cost grows: tokens per second against the number of streams, and against the context.

    python benchmarks/growth.py results.json --model DIR [--trioserve-flags "..."] [--plots docs/plots]

Streams: 1 to 128, 20 words in and 128 tokens out, over HTTP. Context: 128 to 7,936 tokens before the first
that is counted, 64 out, 1 and 8 streams; tokens per second of all streams together, from each one's first
token to its last. Medians of the repetitions. With --llama-server and --gguf, the same of llama.cpp.

Writes JSON and, with --plots, streams.svg and context.svg, for which matplotlib is needed. With no other
flag, --plots draws what an earlier run has written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compare_loads import decode_bodies, prompt_of_ids, warm_up
from growth_plots import draw
from machine import describe_machine, git_commit
from peers import llama_cpp, running, trioserve
from stream_client import run_load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peers import Peer
    from stream_client import Target

STREAMS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 7936)
CONTEXT_STREAMS = (1, 8)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # not without ending the server
    args = parse()
    results: dict[str, Any] = {"machine": describe_machine(), "commit": git_commit(), "servers": {}}
    if args.results.exists():
        results = json.loads(args.results.read_text())
    for peer in peers(args):
        with running(peer) as server:
            warm_up(server.target)
            results["servers"][peer.name] = {
                "command": " ".join(peer.command),
                "streams": {count: streams(server.target, count, args.repeat) for count in args.streams},
                "context": {
                    count: {size: context(server.target, count, size, args.repeat) for size in args.contexts}
                    for count in CONTEXT_STREAMS
                },
            }
        args.results.write_text(json.dumps(results, indent=1) + "\n")
    if args.plots:
        draw(json.loads(args.results.read_text()), args.plots)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON file")
    parser.add_argument("--model", help="of trioserve")
    parser.add_argument("--trioserve-flags", default="", help="further ones, in one word")
    parser.add_argument("--llama-server")
    parser.add_argument("--gguf", help="of llama.cpp")
    parser.add_argument("--streams", nargs="+", type=int, default=STREAMS)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--plots", type=Path, help="directory")
    return parser.parse_args()


def peers(args: argparse.Namespace) -> Iterator[Peer]:
    """With room for 8 sequences of 8,192 tokens, or 128 short ones."""
    if args.model:
        flags = ["--kv-cache-memory", "2GiB", "--max-num-seqs", "128", *args.trioserve_flags.split()]
        yield trioserve("trioserve", args.model, flags)
    if args.llama_server and args.gguf:
        threads = len(os.sched_getaffinity(0))
        # One cache for all slots, so that a long sequence may have more than its share.
        flags = ["-np", "128", "-c", str(8 * 8192), "--kv-unified"]
        yield llama_cpp(args.llama_server, args.gguf, threads, flags)


def streams(target: Target, count: int, repeat: int) -> float:
    """Tokens per second."""
    rates = []
    for _ in range(repeat):
        load = run_load(target, decode_bodies(f"{time.time_ns()}", max(4, count)), count)
        rates.append(load.num_tokens / load.seconds)
    return told(f"{count} streams", rates)


def context(target: Target, count: int, size: int, repeat: int) -> float:
    """Tokens per second of all streams together."""
    rates = []
    for _ in range(repeat):
        bodies = [
            {"prompt": prompt_of_ids(f"{time.time_ns()} {number}", size), "max_tokens": 1}
            for number in range(count)
        ]
        run_load(target, bodies, count)  # so that the next finds all its prompts in the prefix cache
        load = run_load(target, [{**body, "max_tokens": 64} for body in bodies], count)
        rates.append(sum(answer.decode_rate for answer in load.answers))
    return told(f"{count} streams, {size} tokens before", rates)


def told(what: str, rates: list[float]) -> float:
    median = round(statistics.median(rates), 1)
    print(f"{what}: {median} tokens/s", flush=True)
    return median


if __name__ == "__main__":
    main()
