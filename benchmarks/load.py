"""Streaming load on any OpenAI-compatible server: output tokens per second and latencies.

python benchmarks/load.py http://127.0.0.1:8000 smollm2-135m --concurrency 1,8,32

Prints one JSON line per concurrency level.
"""

from __future__ import annotations

import argparse
import json
import urllib.parse

from stream_client import Target, percentile, run_load

PROMPT = "Request {number}. Write a story about a river, a stone, the light, a cloud and an engine."


def measure(target: Target, concurrency: int, max_tokens: int) -> dict[str, object]:
    bodies = [
        {"prompt": PROMPT.format(number=number), "max_tokens": max_tokens}
        for number in range(max(2, 2 * concurrency))
    ]
    load = run_load(target, bodies, concurrency)
    return {
        "concurrency": concurrency,
        "tokens_per_second": round(load.num_tokens / load.seconds, 1),
        "ttft_ms_p50": milliseconds(load.first_tokens, 0.5),
        "itl_ms_p50": milliseconds(load.gaps, 0.5),
        "itl_ms_p99": milliseconds(load.gaps, 0.99),
    }


def milliseconds(values: list[float], share: float) -> float:
    return round(percentile(values, share) * 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    url = urllib.parse.urlsplit(args.url)
    target = Target(host=url.hostname or "127.0.0.1", port=url.port or 80, model=args.model)
    for concurrency in map(int, args.concurrency.split(",")):
        print(json.dumps(measure(target, concurrency, args.max_tokens)), flush=True)


if __name__ == "__main__":
    main()
