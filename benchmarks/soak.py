"""A server under everything at once, for as long as one likes.

python benchmarks/soak.py [--seconds 60] [--seed 0] [--rate 8] [--kills 3] [serve flags]

Starts `trioserve serve` with a restart policy and small limits. Clients arrive at random: they ask, leave at
any moment, read slowly, set deadlines, send nonsense (`soak_clients.py`). Meanwhile the engine is killed,
and stopped so that it looks alive, a number of times. At the end nothing may run or wait, all KV blocks must
be free, and memory, file descriptors and threads must be where they were after the first tenth of the time.

Prints one JSON line per tenth, then a Markdown summary; the exit code is 1 if anything is not as it should.
Traffic stays on the loopback interface. Linux only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from typing import Any

import attrs
import trio
from soak_clients import EXPECTED, KINDS, Target, UnexpectedError, first, run_client
from soak_watch import Sample, children_of, read_metrics, sample

from served import serve

KEY = "soak-key"
FLAGS = (
    "--engine-restart", "on-failure", "--engine-restart-limit", "1000", "--engine-restart-backoff", "0.2",
    "--step-timeout", "10", "--max-num-queued-reqs", "64", "--max-num-seqs", "24", "--write-timeout", "5",
    "--request-timeout", "60", "--kv-cache-memory", "192MiB", "--api-key", KEY, "--log.access", "false",
)  # fmt: skip
"""Small limits, so that they are met."""

READY = b"GET /health/ready HTTP/1.1\r\nhost: soak\r\nconnection: close\r\n\r\n"

MAX_CLIENTS = 200
"""At a time; an arrival that would be one more is left out."""

RECOVERY = 120.0
"""Seconds after an injected death by which the next engine must be ready. Until then requests may fail."""

AFTERMATH = 2.0
"""Seconds more, for what had begun by then."""

DEATHS = {"engine_dead", "engine_restarting", "overloaded"}

RSS_GROWTH = 24.0
"""MiB that the API process may grow after the first tenth: caches of tokenizers, grammars and templates fill,
and an allocator keeps what it had at the peak."""


@attrs.define(eq=False)
class Soak:
    """One run: what was done, and what came of it."""

    process: subprocess.Popen[bytes]
    target: Target
    seconds: float
    rate: float
    num_kills: int
    random: random.Random
    words: defaultdict[str, Counter[str]] = attrs.field(factory=lambda: defaultdict(Counter))
    problems: list[str] = attrs.field(factory=list)
    samples: list[Sample] = attrs.field(factory=list)
    """The first one: idle, after some answers. The last one: idle again."""
    num_left_out: int = 0
    num_open: int = 0
    deaths: list[str] = attrs.field(factory=list)
    recoveries: list[float] = attrs.field(factory=list)
    """Seconds from each death until the next engine was ready."""
    _death_until: float = -1.0

    async def run(self) -> None:
        await self._client(first, random.Random(0))
        self._report("start")
        async with trio.open_nursery() as clients:
            with trio.move_on_after(self.seconds):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._arrivals, clients)
                    nursery.start_soon(self._kill)
                    nursery.start_soon(self._measure)
                    nursery.start_soon(self._probe)
        await self._settle()

    async def _arrivals(self, clients: trio.Nursery) -> None:
        while True:
            await trio.sleep(self.random.expovariate(self.rate))
            if self.num_open >= MAX_CLIENTS:
                self.num_left_out += 1
                continue
            (kind,) = self.random.choices(list(KINDS), weights=list(KINDS.values()))
            clients.start_soon(self._client, kind, random.Random(self.random.getrandbits(64)))

    async def _client(self, kind: Any, random_: random.Random) -> None:
        self.num_open += 1
        began = trio.current_time()
        try:
            word = await run_client(kind, self.target, random_)
        except UnexpectedError as error:
            word = "unexpected"
            self.problems.append(f"{kind.__name__}: {error}")
        finally:
            self.num_open -= 1
        self.words[kind.__name__][word] += 1
        allowed = EXPECTED[kind] | (DEATHS if began <= self._death_until else set())
        if word not in allowed:
            seconds = trio.current_time() - began
            self.problems.append(f"{kind.__name__}: {word} after {seconds:.1f} s")

    async def _kill(self) -> None:
        """At even distances; every third time the core is not killed but stopped."""
        async with trio.open_nursery() as nursery:
            for number in range(self.num_kills):
                await trio.sleep(self.seconds * 0.8 / self.num_kills)
                engines = children_of(self.process.pid)
                if engines and self._death_until < trio.current_time():
                    how = signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL
                    self._death_until = math.inf
                    os.kill(engines[0], how)
                    self.deaths.append(how.name)
                    nursery.start_soon(self._await_recovery, engines[0])

    async def _await_recovery(self, dead: int) -> None:
        started = trio.current_time()
        with trio.move_on_after(RECOVERY):
            while not await self._has_recovered(dead):  # noqa: ASYNC110 - the server is another process
                await trio.sleep(0.2)
            self.recoveries.append(trio.current_time() - started)
            self._death_until = trio.current_time() + AFTERMATH
            return
        self._death_until = trio.current_time()
        self.problems.append(f"{RECOVERY:g} s after its death the engine is not ready again")

    async def _has_recovered(self, dead: int) -> bool:
        if dead in children_of(self.process.pid):
            return False
        async with await self.target.connect() as connection:
            await connection.send_raw(
                b"GET /health/ready HTTP/1.1\r\nhost: soak\r\nconnection: close\r\n\r\n"
            )
            return (await connection.read_raw()).startswith(b"HTTP/1.1 200")

    async def _measure(self) -> None:
        for tenth in range(1, 10):
            await trio.sleep(self.seconds / 10)
            self._report(f"{tenth}0%")

    def _report(self, when: str) -> None:
        self.samples.append(sample(self.process.pid))
        total = sum(sum(words.values()) for words in self.words.values())
        line = {
            "at": when,
            "clients": total,
            "problems": len(self.problems),
            **attrs.asdict(self.samples[-1]),
        }
        print(
            json.dumps({name: round(v, 1) if isinstance(v, float) else v for name, v in line.items()}),
            flush=True,
        )

    async def _probe(self) -> None:
        """The server is alive all the time, whatever its engine does."""
        while True:
            await trio.sleep(1)
            async with await self.target.connect() as connection:
                await connection.send_raw(
                    b"GET /health/live HTTP/1.1\r\nhost: soak\r\nconnection: close\r\n\r\n"
                )
                with trio.move_on_after(30):
                    head = await connection.read_raw()
                    if head.startswith(b"HTTP/1.1 200"):
                        continue
                self.problems.append("/health/live did not answer with 200")

    async def _settle(self) -> None:
        """Until nothing runs, and idle worker threads and connections have gone."""
        with trio.move_on_after(90):
            while not await self._is_idle():  # noqa: ASYNC110 - the server is another process
                await trio.sleep(0.2)
        await trio.sleep(min(12.0, self.seconds / 4))

    async def _is_idle(self) -> bool:
        metrics = await trio.to_thread.run_sync(read_metrics, self.target.port, KEY)
        return not any(metrics[name] for name in LEVELS)


LEVELS = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def judge(soak: Soak, log: str) -> list[str]:
    """What is not as it should be."""
    found = list(dict.fromkeys(soak.problems))
    metrics = read_metrics(soak.target.port, KEY)
    found += [f"{name} is {metrics[name]:g} at the end" for name in LEVELS if metrics[name]]
    if metrics.get("engine_restarts_total", 0) < len(soak.deaths):
        found.append(f"{len(soak.deaths)} deaths, {metrics.get('engine_restarts_total', 0):g} restarts")
    start, tenth, end = soak.samples[0], soak.samples[1], soak.samples[-1]
    if end.rss_mib > tenth.rss_mib + RSS_GROWTH:
        found.append(f"the API process grew from {tenth.rss_mib:.0f} to {end.rss_mib:.0f} MiB")
    if end.fds > start.fds or end.engine_fds > start.engine_fds:
        found.append(
            f"open files: {start.fds} + {start.engine_fds} at first, {end.fds} + {end.engine_fds} at last"
        )
    if end.threads > start.threads or end.engine_threads > start.engine_threads + 1:
        found.append(
            f"threads: {start.threads} + {start.engine_threads}, {end.threads} + {end.engine_threads}"
        )
    if "Traceback" in log:
        found.append("a traceback in the log:\n" + log[log.index("Traceback") - 500 :][:3000])
    return found


def summary(soak: Soak, metrics: dict[str, float]) -> str:
    """Markdown."""
    words = sorted({word for counter in soak.words.values() for word in counter})
    lines = ["| clients | " + " | ".join(words) + " |", "|---|" + "---|" * len(words)]
    lines += [
        f"| {kind} | " + " | ".join(str(counter[word] or "") for word in words) + " |"
        for kind, counter in sorted(soak.words.items())
    ]
    lines += ["", "| | idle at first | after a tenth | idle at last |", "|---|---|---|---|"]
    chosen = [attrs.asdict(soak.samples[index]) for index in (0, 1, -1)]
    lines += [
        f"| {name} | " + " | ".join(f"{each[name]:.0f}" for each in chosen) + " |" for name in chosen[0]
    ]
    freed = metrics.get("abort_to_free_seconds_count", 0)
    mean = metrics.get("abort_to_free_seconds_sum", 0) / freed * 1e3 if freed else 0.0
    deaths = ", ".join(soak.deaths) or "none"
    recoveries = ", ".join(f"{seconds:.0f}" for seconds in soak.recoveries) or "-"
    lines += ["", f"Engine deaths: {deaths}; ready again after {recoveries} s."]
    lines.append(f"{freed:.0f} aborts, freed after {mean:.0f} ms on average.")
    lines.append(f"{soak.num_left_out} arrivals left out.")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=8, help="clients that arrive in a second, on average")
    parser.add_argument("--kills", type=int, default=3)
    options, flags = parser.parse_known_args(arguments)
    with serve([*FLAGS, *flags]) as served:
        process, target = served.process, Target(served.port, KEY, served.model)
        soak = Soak(
            process, target, options.seconds, options.rate, options.kills, random.Random(options.seed)
        )
        trio.run(soak.run)
        soak._report("the end")
        problems = judge(soak, served.log)
        print("\n" + summary(soak, read_metrics(target.port, KEY)))
        process.terminate()
        if (code := process.wait(60)) != 0:
            problems.append(f"the server's exit code is {code}")
    print(
        "\n" + ("\n".join(f"PROBLEM: {problem}" for problem in problems) or "No error that was not injected.")
    )
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
