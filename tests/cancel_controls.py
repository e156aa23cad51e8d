"""Pausing, sleeping, waking and draining, given up half way: the engine serves all the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import attrs
import trio

from cancel_everywhere import LeakError
from cancel_worlds import PROMPT, CoreWorld, sampling
from trioserve import FinishReason
from trioserve.nurseries import ungrouped

if TYPE_CHECKING:
    from cancel_everywhere import Target
    from trioserve import AsyncLLM

__all__ = ["CONTROLS", "DONE", "Control", "ControlledWorld"]

DONE = "done"

_Call = Callable[["AsyncLLM"], Awaitable[object]]


async def _nothing(_: AsyncLLM) -> None:
    pass


@attrs.frozen
class Control:
    name: str
    call: _Call
    before: _Call = _nothing
    """What puts the engine into the state that the call needs."""

    async def run(self, world: CoreWorld, target: Target) -> object:
        await self.before(world.llm)
        with target.here():
            await self.call(world.llm)
            return DONE
        return None


CONTROLS = [
    Control("pause, abort", lambda llm: llm.pause_generation("abort")),
    Control("pause, wait", lambda llm: llm.pause_generation("wait")),
    Control("pause, keep", lambda llm: llm.pause_generation("keep", clear_cache=False)),
    Control("resume", lambda llm: llm.resume_generation(), lambda llm: llm.pause_generation("keep")),
    Control("sleep 1, wait", lambda llm: llm.sleep(1, "wait")),
    Control("sleep 2, keep", lambda llm: llm.sleep(2, "keep")),
    Control("wake up", lambda llm: llm.wake_up(), lambda llm: llm.sleep(2, "abort")),
    Control("reset the prefix cache", lambda llm: llm.reset_prefix_cache(True)),
    Control("drain", lambda llm: llm.wait_for_requests_to_drain(3600)),
]


class ControlledWorld(CoreWorld):
    """After each run the engine is woken and resumed, and must answer as ever."""

    async def run_beside(self, request: Callable[[], Awaitable[object]]) -> object:
        expected = await self.text(PROMPT)
        with ungrouped():
            async with trio.open_nursery() as nursery:
                await nursery.start(self._be_under_way)
                result = await request()
                await self.llm.wake_up()
                await self.llm.resume_generation()
        answer = await self.llm.complete(PROMPT, sampling())
        if answer.outputs[0].text != expected:
            raise LeakError(f"afterwards the engine answers {answer.outputs[0]!r}")
        return result

    async def _be_under_way(self, task_status: trio.TaskStatus[None]) -> None:
        """A request that the control may pause, or end, and not harm otherwise."""
        expected = await self.text(PROMPT)
        async with self.llm.stream(PROMPT, sampling()) as outputs:
            task_status.started()
            async for output in outputs:
                last = output.outputs[0]
        whole = last.finish_reason is FinishReason.LENGTH and last.text == expected
        if not whole and last.finish_reason is not FinishReason.ABORT:
            raise LeakError(f"a request under way ended with {last!r}")
