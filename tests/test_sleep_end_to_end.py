"""Holding, sleeping and the order of service, by the real model in the real engine process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from served import MODEL, STEADY
from trioserve import AsyncLLM, EngineArgs, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LONG_PROMPT = "The sea was calm that morning, and nobody spoke. " * 50
BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""Layers, keys and values, heads, their size, float32."""
PROMPTS = ["Once upon a time", "The capital of France is", "def fibonacci(n):\n"]
LENGTH = 24
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)


def new_llm(**values: Any) -> AsyncLLM:
    args = {"model": MODEL, "dtype": STEADY, "threads": 1, "log": {"stats_interval": 0}, **values}
    return AsyncLLM.from_engine_args(EngineArgs.from_dict(args))


def resident_bytes(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line)
    return int(line.split()[1]) * 1024


class Crowd:
    """Requests whose progress can be seen."""

    def __init__(self, llm: AsyncLLM, nursery: trio.Nursery, prompts: list[str]) -> None:
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self._llm = llm
        self._done = [trio.Event() for _ in prompts]
        for number, prompt in enumerate(prompts):
            nursery.start_soon(self._run, number, prompt)

    async def _run(self, number: int, prompt: str) -> None:
        async with self._llm.stream(prompt, GREEDY) as outputs:
            async for output in outputs:
                self.tokens[number] = list(output.outputs[0].token_ids)
        self._done[number].set()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def is_done(self) -> bool:
        return self.num_tokens == LENGTH * len(self.tokens)

    async def wait_under_way(self) -> None:
        await wait_until(self._llm, lambda: min(map(len, self.tokens)) >= LENGTH // 4)

    async def wait_done(self) -> list[list[int]]:
        for done in self._done:
            await done.wait()
        return self.tokens


async def wait_until(llm: AsyncLLM, condition: Callable[[], bool]) -> None:
    """Each round trip brings newer figures."""
    with trio.fail_after(60):
        while not condition():
            await llm.check_health()


async def settled(llm: AsyncLLM, crowd: Crowd) -> int:
    """Tokens so far, when all that has been sent is here."""
    await llm.check_health()
    await trio.testing.wait_all_tasks_blocked()
    return crowd.num_tokens


async def test_asleep_memory_is_given_back_and_afterwards_all_go_on(
    own_children: Callable[[], set[int]],
) -> None:
    async with new_llm(kv_cache_memory="400MiB", dtype="float32") as llm, trio.open_nursery() as nursery:
        (engine,) = own_children()
        expected = await Crowd(llm, nursery, [*PROMPTS, LONG_PROMPT]).wait_done()
        for level in (1, 2):
            crowd = Crowd(llm, nursery, [*PROMPTS, LONG_PROMPT])
            await crowd.wait_under_way()
            awake = resident_bytes(engine)
            await llm.sleep(level, mode="keep")
            late = Crowd(llm, nursery, [*PROMPTS, LONG_PROMPT])
            num_tokens = await settled(llm, crowd)
            assert await llm.is_sleeping()
            freed = awake - resident_bytes(engine)
            # The cache is touched as far as it is used: that is the least that level 1 has to give.
            assert freed > len(LONG_PROMPT.split()) * BYTES_PER_TOKEN / 2
            assert level == 1 or freed > awake / 2
            assert await settled(llm, late) == 0
            assert crowd.num_tokens == num_tokens
            assert not crowd.is_done
            await llm.wake_up()
            assert await crowd.wait_done() == expected
            assert await late.wait_done() == expected
            assert not await llm.is_sleeping()
            assert resident_bytes(engine) > awake - freed


async def test_outputs_do_not_show_a_pause_or_a_lost_cache() -> None:
    async def pause(llm: AsyncLLM) -> None:
        await llm.pause_generation("keep", clear_cache=False)
        assert await llm.is_paused()
        await llm.resume_generation()

    async def pause_and_forget(llm: AsyncLLM) -> None:
        await llm.pause_generation("keep")
        await llm.resume_generation()

    async def forget(llm: AsyncLLM) -> None:
        assert not await llm.reset_prefix_cache()
        assert await llm.reset_prefix_cache(reset_running_requests=True)

    interruptions: list[Callable[[AsyncLLM], Awaitable[None]]] = [pause, pause_and_forget, forget]
    async with new_llm() as llm, trio.open_nursery() as nursery:
        expected = await Crowd(llm, nursery, PROMPTS).wait_done()
        preemptions = []
        for interrupt in interruptions:
            crowd = Crowd(llm, nursery, PROMPTS)
            await crowd.wait_under_way()
            await interrupt(llm)
            assert not crowd.is_done
            assert await crowd.wait_done() == expected
            preemptions.append(llm.metrics.totals().preemptions)
    assert preemptions[0] == 0 < preemptions[1] < preemptions[2]


async def order_of_service(llm: AsyncLLM, requests: list[tuple[int, float]]) -> list[int]:
    """Requests, given by priority and seconds until the deadline, in the order in which they end. They arrive
    in the order of the list, while another one runs."""
    order: list[int] = []

    async def run(number: int, priority: int, seconds: float, task_status: trio.TaskStatus[None]) -> None:
        with trio.move_on_after(seconds):
            async with llm.stream("Hello", SamplingParams(max_tokens=4), priority=priority) as outputs:
                task_status.started()
                async for _ in outputs:
                    pass
                order.append(number)

    async with trio.open_nursery() as nursery, llm.stream("Hello", ENDLESS, priority=-1) as outputs:
        await anext(outputs)
        for number, (priority, seconds) in enumerate(requests):
            await nursery.start(run, number, priority, seconds)
        await wait_until(llm, lambda: llm.metrics.totals().waiting == len(requests))
    return order


NEVER = float("inf")


@pytest.mark.parametrize(
    ("policy", "requests", "expected"),
    [
        ("fcfs", [(3, NEVER), (1, 300), (2, 200)], [0, 1, 2]),
        ("priority", [(3, NEVER), (1, NEVER), (2, 200), (1, 300)], [1, 3, 2, 0]),
        ("deadline", [(0, NEVER), (1, 300), (2, 200), (3, 400)], [2, 1, 3, 0]),
    ],
)
async def test_the_policy_is_the_order_of_service(
    policy: str, requests: list[tuple[int, float]], expected: list[int]
) -> None:
    async with new_llm(max_num_seqs=1, scheduling_policy=policy) as llm:
        assert await order_of_service(llm, requests) == expected
