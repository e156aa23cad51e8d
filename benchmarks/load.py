"""Streaming load on any OpenAI-compatible server: output tokens per second and latencies.

python benchmarks/load.py http://127.0.0.1:8000 smollm2-135m --concurrency 1,8,32

Prints one JSON line per concurrency level. The client is lean on purpose (bare sockets, no parsing beyond
what is counted): on a small machine it shares the processors with the server.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import urllib.parse

import attrs
import trio

PROMPT = "Request {number}. Write a story about a river, a stone, the light, a cloud and an engine."


@attrs.define
class Answer:
    """What one request showed; times in seconds."""

    first_token: float
    gaps: list[float]
    num_tokens: int


async def ask(host: str, port: int, body: dict[str, object]) -> Answer:
    """One streaming completion, on a connection of its own."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    started = trio.current_time()
    arrivals: list[float] = []
    num_tokens = 0
    async with await trio.open_tcp_stream(host, port) as stream:
        await stream.send_all(head.encode() + data)
        rest = b""
        async for received in stream:
            now = trio.current_time()
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                if line.startswith(b'data: {"'):
                    usage = json.loads(line[6:]).get("usage")
                    if usage is None:
                        arrivals.append(now)
                    else:
                        num_tokens = usage["completion_tokens"]
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    return Answer(arrivals[0] - started, gaps, num_tokens)


def percentile(values: list[float], share: float) -> float:
    """In milliseconds."""
    return round(statistics.quantiles(values, n=100)[round(share * 100) - 1] * 1e3, 1)


async def measure(args: argparse.Namespace, concurrency: int) -> dict[str, object]:
    url = urllib.parse.urlsplit(args.url)
    slots = trio.CapacityLimiter(concurrency)
    answers: list[Answer] = []

    async def one(number: int) -> None:
        async with slots:
            body = {
                "model": args.model,
                "prompt": PROMPT.format(number=number),
                "max_tokens": args.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            answers.append(await ask(url.hostname or "127.0.0.1", url.port or 80, body))

    started = trio.current_time()
    async with trio.open_nursery() as nursery:
        for number in range(max(2, 2 * concurrency)):
            nursery.start_soon(one, number)
    seconds = trio.current_time() - started
    gaps = [gap for answer in answers for gap in answer.gaps]
    first_tokens = [answer.first_token for answer in answers]
    return {
        "concurrency": concurrency,
        "tokens_per_second": round(sum(answer.num_tokens for answer in answers) / seconds, 1),
        "ttft_ms_p50": percentile(first_tokens, 0.5),
        "itl_ms_p50": percentile(gaps, 0.5),
        "itl_ms_p99": percentile(gaps, 0.99),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    for concurrency in map(int, args.concurrency.split(",")):
        print(json.dumps(trio.run(measure, args, concurrency)), flush=True)


if __name__ == "__main__":
    main()
