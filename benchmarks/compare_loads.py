"""What `compare.py` asks of each server, and what it keeps of the answers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from stream_client import percentile, run_load

if TYPE_CHECKING:
    from collections.abc import Callable

    from stream_client import Load, Target

    Measure = Callable[[Target, int], dict[str, Any]]

__all__ = ["LOADS", "decode_bodies", "prompt_of_ids", "prompt_of_words", "warm_up"]

_WORDS = (
    *("river", "stone", "light", "cloud", "engine", "paper", "garden", "winter"),
    *("music", "bridge", "signal", "forest", "copper", "window", "market", "letter"),
)


def prompt_of_words(seed: str, num_words: int = 20) -> str:
    """Differs from its first word on, so that no server finds it in its prefix cache."""
    draw = random.Random(seed)
    return " ".join(draw.choice(_WORDS) for _ in range(num_words))


def prompt_of_ids(seed: str, num_tokens: int) -> list[int]:
    """Token ids that any vocabulary of at least 30,000 has, and none of which is special."""
    draw = random.Random(seed)
    return [draw.randrange(1000, 30000) for _ in range(num_tokens)]


def decode_bodies(seed: str, num_requests: int, max_tokens: int = 128) -> list[dict[str, Any]]:
    return [
        {"prompt": prompt_of_words(f"{seed} {number}"), "max_tokens": max_tokens}
        for number in range(num_requests)
    ]


def warm_up(target: Target) -> None:
    """What is only done once, for every size of a batch that is measured."""
    for concurrency in (1, 8, 32):
        run_load(target, decode_bodies(f"warm {concurrency}", concurrency, max_tokens=8), concurrency)
    body = {"prompt": prompt_of_ids("warm", 1024), "max_tokens": 1}
    run_load(target, [body, {**body, "prompt": prompt_of_ids("warmer", 1024)}], 2)


def _streams(concurrency: int) -> Measure:
    def measure(target: Target, round_number: int) -> dict[str, Any]:
        bodies = decode_bodies(f"{round_number} {concurrency}", max(4, 2 * concurrency))
        load = run_load(target, bodies, concurrency)
        gaps = load.gaps
        middle, late = percentile(gaps, 0.5), percentile(gaps, 0.99)
        return {
            "tokens_per_second": load.num_tokens / load.seconds,
            "ttft_ms_p50": percentile(load.first_tokens, 0.5) * 1e3,
            "gap_ms_p50": middle * 1e3,
            "gap_ms_p99": late * 1e3,
            "gap_p99_of_p50": late / middle if middle else None,
            "gap_ms_max": max(gaps) * 1e3,
            "ttft_ms": [round(seconds * 1e3, 2) for seconds in load.first_tokens],
            **_client_cost(load),
        }

    return measure


def _prefill(target: Target, round_number: int) -> dict[str, Any]:
    """8 prompts of 1,024 tokens at once, one token each."""
    bodies = [
        {"prompt": prompt_of_ids(f"prefill {round_number} {number}", 1024), "max_tokens": 1}
        for number in range(8)
    ]
    load = run_load(target, bodies, 8)
    return {"prompt_tokens_per_second": 8 * 1024 / load.seconds, **_client_cost(load)}


def _shared_prefix(target: Target, round_number: int) -> dict[str, Any]:
    """Two requests, one after the other, whose first 1,000 tokens are the same."""
    prefix = prompt_of_ids(f"prefix {round_number}", 1000)
    first, second = (
        run_load(
            target, [{"prompt": prefix + prompt_of_ids(f"{round_number} {number}", 16), "max_tokens": 8}], 1
        )
        .answers[0]
        .first_token
        for number in range(2)
    )
    return {"first_ttft_ms": first * 1e3, "second_ttft_ms": second * 1e3, "second_of_first": second / first}


def _client_cost(load: Load) -> dict[str, float]:
    return {
        "seconds": load.seconds,
        "events_per_token": load.events_per_token,
        "client_cpu_share": load.client_cpu_seconds / load.seconds,
        "client_us_per_token": load.client_cpu_seconds / load.num_tokens * 1e6,
    }


LOADS: dict[str, Measure] = {
    "streams_1": _streams(1),
    "streams_8": _streams(8),
    "streams_32": _streams(32),
    "prefill": _prefill,
    "prefix": _shared_prefix,
}
