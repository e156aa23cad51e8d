"""The engine core under AsyncLLM: starting, being cancelled, dying, in a process and without one."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable

import pytest
import trio

from served import MODEL, STEADY, is_running
from trioserve import AsyncLLM, EngineArgs, EngineDeadError, EngineStartError, SamplingParams
from trioserve.frontend.prompts import TokensPrompt

LONG = SamplingParams(max_tokens=4000, ignore_eos=True)


OwnChildren = Callable[[], set[int]]


def engine_args(**values: object) -> EngineArgs:
    return EngineArgs.from_dict({"model": MODEL, "threads": 1, "log": {"stats_interval": 0}, **values})


async def wait_until_idle(llm: AsyncLLM) -> None:
    """Until nothing runs or waits, and no block is held. Each round trip brings newer figures."""
    with trio.fail_after(30):
        while (now := llm.metrics.totals()) and (now.running or now.waiting or now.kv_cache_usage):
            await llm.check_health()


async def test_the_engine_is_gone_when_the_scope_is(own_children: OwnChildren) -> None:
    async with AsyncLLM.from_engine_args(engine_args()) as llm:
        (engine,) = own_children()
        assert llm.is_running
        await llm.check_health()
    assert not is_running(engine)
    assert not llm.is_running
    assert not llm.errored


async def test_closing_does_not_wait_for_running_requests(own_children: OwnChildren) -> None:
    async with AsyncLLM.from_engine_args(engine_args()) as llm, llm.stream("x", LONG) as outputs:
        await anext(outputs)
        (engine,) = own_children()
    assert not is_running(engine)


async def test_closing_while_requests_are_being_sent_is_no_death() -> None:
    """The link ends in the middle of one of them."""
    async with AsyncLLM.from_engine_args(engine_args()) as llm:
        await llm.pause_generation("keep")  # so that no step keeps the core from ending in time
        for _ in range(300):
            await llm.submit(TokensPrompt([5] * 4000))
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
    assert not llm.errored, llm.dead_error


@pytest.mark.parametrize("engine", ["process", "inproc"])
@pytest.mark.parametrize("seconds", [0.01, 0.3, 0.6])
async def test_a_start_can_be_cancelled(engine: str, seconds: float, own_children: OwnChildren) -> None:
    with trio.move_on_after(seconds) as scope:
        async with AsyncLLM.from_engine_args(engine_args(engine=engine)):
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert not own_children()


async def test_a_process_that_cannot_be_started_is_a_start_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_process(*_: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("trioserve.link.process._start_child", no_process)
    with pytest.raises(EngineStartError, match="temporarily unavailable"):
        async with AsyncLLM.from_engine_args(engine_args()):
            raise AssertionError("it cannot start")


async def test_in_process_a_core_that_lacks_file_descriptors_is_a_start_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_socket(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("trioserve.link.inproc.socket.socketpair", no_socket)
    with pytest.raises(EngineStartError, match="Too many open files"):
        async with AsyncLLM.from_engine_args(engine_args(engine="inproc")):
            raise AssertionError("it cannot start")


async def test_a_core_is_reaped_where_no_file_descriptor_is_left(own_children: OwnChildren) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with AsyncLLM.from_engine_args(engine_args()) as llm:
        (engine,) = own_children()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
            os.kill(engine, signal.SIGKILL)
            assert "SIGKILL" in str(await llm.wait_dead())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not is_running(engine)


async def test_a_failed_start_is_one_error_with_the_cause() -> None:
    with pytest.raises(EngineStartError, match="kv_cache_memory"):
        async with AsyncLLM.from_engine_args(engine_args(kv_cache_memory="1MiB")):
            raise AssertionError("it cannot start")


async def test_a_failed_start_in_process_is_the_same_error() -> None:
    with pytest.raises(EngineStartError, match="kv_cache_memory"):
        async with AsyncLLM.from_engine_args(engine_args(kv_cache_memory="1MiB", engine="inproc")):
            raise AssertionError("it cannot start")


async def test_a_killed_engine_is_noticed_by_every_request_and_by_nobody_else(
    own_children: OwnChildren,
) -> None:
    failed = 0

    async def consume(llm: AsyncLLM, started: trio.Event) -> None:
        nonlocal failed
        try:
            async with llm.stream("x", LONG) as outputs:
                async for _ in outputs:
                    started.set()
        except EngineDeadError as error:
            failed += "signal SIGKILL" in str(error)

    async with AsyncLLM.from_engine_args(engine_args()) as llm:
        async with trio.open_nursery() as nursery:
            events = [trio.Event() for _ in range(3)]
            for event in events:
                nursery.start_soon(consume, llm, event)
            for event in events:
                await event.wait()
            os.kill(own_children().pop(), signal.SIGKILL)
        assert failed == 3
        assert llm.errored
        with pytest.raises(EngineDeadError):
            await llm.complete("y")


async def test_the_engine_ignores_signals_meant_for_the_whole_group(own_children: OwnChildren) -> None:
    async with AsyncLLM.from_engine_args(engine_args()) as llm:
        os.kill(own_children().pop(), signal.SIGINT)
        os.kill(own_children().pop(), signal.SIGTERM)
        output = await llm.complete("x", SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2


async def test_what_the_engine_holds_returns_to_nothing_after_any_end() -> None:
    """Abort while queued, prefilling and decoding; a stop string; an ordinary end (I4)."""
    async with AsyncLLM.from_engine_args(engine_args(max_num_seqs=2)) as llm:

        async def leave(prompt: str, seconds: float) -> None:
            with trio.move_on_after(seconds):
                await llm.complete(prompt, LONG)

        async with trio.open_nursery() as nursery:
            for seconds in (0, 0.001, 0.05, 0.1, 0.2, 0.3):
                nursery.start_soon(leave, "word " * 600, seconds)
                nursery.start_soon(leave, "x", seconds)
            nursery.start_soon(llm.complete, "Once upon a time", SamplingParams(max_tokens=5))
            nursery.start_soon(llm.complete, "Once upon a time", SamplingParams(max_tokens=50, stop="e"))
        await llm.check_health()  # a round trip: what was sent before has arrived
        await wait_until_idle(llm)
        assert await llm.reset_prefix_cache()
        assert llm.num_open_requests == 0


async def test_in_process_or_not_the_answer_is_the_same(own_children: OwnChildren) -> None:
    texts = []
    for engine in ("process", "inproc"):
        async with AsyncLLM.from_engine_args(engine_args(engine=engine, dtype=STEADY)) as llm:
            assert bool(own_children()) == (engine == "process")
            output = await llm.complete("The capital of France is", SamplingParams(temperature=0))
            texts.append(output.outputs[0].text)
    assert texts[0] == texts[1]
    assert "Paris" in texts[0]
