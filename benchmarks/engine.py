"""What the CPU engine does by itself: no server, no scheduler, no sampling but of the likeliest token.

    python benchmarks/engine.py MODEL [--dtype bfloat16] [--quantization none] [--kernels auto] [--threads 2]

Decode: tokens per second at a context of 100 tokens, all sequences in one step. Prefill: one prompt. Context:
the share of the memory's bandwidth at which attention reads keys and values, which its phase of a step holds
beside rotary and the cache's writes; bandwidth is what the same threads read just before and just after.
Each figure is the best of several: what the machine can do when nobody else wants it.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import count
from math import gcd
from typing import TYPE_CHECKING

from trioserve.args import EngineArgs
from trioserve.model_sources.resolve import resolve_model
from trioserve.sampling_params import SamplingParams
from trioserve.token_constraints import TokenConstraints
from trioserve.worker.batch import ScheduledSequence
from trioserve.worker.native_executor import NativeExecutor
from trioserve_kernels.native import TIERS, Phase, ThreadPool, available_tiers, load

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_SIZE = 16
BATCHES = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = (128, 512, 1024, 2048)
CONTEXTS = ((1, 4096), (8, 4096), (32, 1024))
_READ_BYTES = 512 << 20
"""More than the caches hold."""


def main() -> None:
    args = parse()
    config = EngineArgs(
        model=args.model,
        dtype=args.dtype,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        cpu_kernels=args.kernels,
        threads=args.threads,
    ).create_engine_config()
    library = load(available_tiers()[0] if args.kernels == "auto" else args.kernels)
    executor = NativeExecutor(library, resolve_model(config.model), config)
    try:
        executor.allocate_kv_cache(2 * max(streams * context for streams, context in CONTEXTS) // BLOCK_SIZE)
        print(f"{args.model}: {args.dtype}, quantization {args.quantization}, {executor.kernels}")
        for streams in BATCHES:
            print_decode(executor, streams)
        for length in PROMPTS:
            print_prefill(executor, length)
        with ThreadPool(library, config.threads) as pool:
            for streams, context in CONTEXTS:
                print_context(executor, pool, streams, context)
    finally:
        executor.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kernels", default="auto", choices=("auto", *TIERS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


def print_decode(executor: NativeExecutor, streams: int) -> None:
    sequences = decoding(streams, context=100)
    seconds = best_step(executor, sequences, repeat=20)
    print(f"decode, {streams} sequences: {streams / seconds:,.0f} tokens/s; {phases(executor, repeat=20)}")


def print_prefill(executor: NativeExecutor, length: int) -> None:
    sequences = [sequence(0, 0, [1000 + token % 20000 for token in range(length)], blocks(0, length))]
    seconds = best_step(executor, sequences, repeat=5)
    print(f"prefill of {length}: {length / seconds:,.0f} tokens/s; {phases(executor, repeat=5)}")


def print_context(executor: NativeExecutor, pool: ThreadPool, streams: int, context: int) -> None:
    """Keys and values that nobody wrote are zeros: as long to read as any."""
    sequences = decoding(streams, context)
    before = pool.read_bandwidth(_READ_BYTES)
    attention = []
    for _ in range(8):
        executor.take_times()
        executor.forward(sequences, {})
        attention.append(executor.take_times()[Phase.ATTENTION])
    bandwidth = max(before, pool.read_bandwidth(_READ_BYTES))
    speed = streams * context / BLOCK_SIZE * executor.bytes_per_block / min(attention)
    print(
        f"attention, {streams} x {context}: {speed / 1e9:.1f} GB/s of {bandwidth / 1e9:.1f} "
        f"({speed / bandwidth:.0%}), {min(attention) * 1e3:.1f} ms"
    )


def best_step(executor: NativeExecutor, sequences: Sequence[ScheduledSequence], repeat: int) -> float:
    """Seconds of the fastest, until all next tokens are known."""
    executor.forward(sequences, {})  # the cache's pages are there from now on
    executor.take_times()
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        rows = executor.forward(sequences, {})
        ends = [row + len(item.token_ids) - 1 for row, item in zip(rows, sequences, strict=True)]
        executor.highest(ends)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def phases(executor: NativeExecutor, repeat: int) -> str:
    """Milliseconds in the mean."""
    times = executor.take_times().items()
    return ", ".join(f"{phase.name.lower()} {seconds / repeat * 1e3:.2f}" for phase, seconds in times)


def decoding(streams: int, context: int) -> list[ScheduledSequence]:
    return [sequence(index, context - 1, [1000 + index], blocks(index, context)) for index in range(streams)]


def blocks(index: int, context: int) -> list[int]:
    """Of a sequence of its own, in no order."""
    size = -(-context // BLOCK_SIZE)
    first = index * size
    stride = next(step for step in count(7) if gcd(size, step) == 1)
    return [first + number * stride % size for number in range(size)]


def sequence(index: int, start: int, token_ids: list[int], table: list[int]) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=index,
        start=start,
        token_ids=token_ids,
        block_tables=[table],
        samples=True,
        params=SamplingParams(),
        constraints=TokenConstraints(),
        seed=0,
        prompt_token_ids=[],
        output_token_ids=[],
        stop_token_ids=frozenset(),
        prompt_logprobs_start=0,
    )


if __name__ == "__main__":
    main()
