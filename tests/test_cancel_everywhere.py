"""The harness finds what it is there to find: each way of breaking an abort is seen, and named."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from cancel_everywhere import (
    BETWEEN,
    RESUMING,
    WAITING,
    Coverage,
    LeakError,
    Moment,
    Scenario,
    Target,
    cancel_everywhere,
)
from cancel_http import HTTP, open_site
from cancel_kinds import LIBRARY
from cancel_report import Row, table
from cancel_worlds import CoreWorld, EngineWorld, ScriptedWorld, open_hash_llm
from trioserve.async_llm import AsyncLLM
from trioserve.core.engine import EngineCore
from trioserve.core.kv_cache import KVCacheManager
from trioserve.core.request import RequestStatus
from trioserve.frontend.channel import OutputChannel
from trioserve.frontend.output_processor import OutputProcessor
from trioserve.server.request_scope import App

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class QuietWorld:
    """No engine and no neighbour: what the harness itself sees."""

    async def run_beside(self, request: Callable[[], Any]) -> object:
        return await request()

    async def find_leaks(self) -> dict[str, object]:
        return {}

    async def rest(self) -> None:
        await trio.testing.wait_all_tasks_blocked()


async def cover(scenario: Scenario, *moments: Moment, expected: object = "result") -> list[Coverage]:
    return await cancel_everywhere(
        "a kind", QuietWorld(), scenario, expected, moments=moments or (WAITING, RESUMING)
    )


async def three_checkpoints(target: Target) -> object:
    with target.here():
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        return "result"
    return None


async def test_each_checkpoint_is_struck_in_a_run_of_its_own() -> None:
    waiting, resuming = await cover(three_checkpoints)
    assert waiting == Coverage("a kind", "as it waits", 3, num_surfaced=3, num_completed=0)
    assert resuming == Coverage("a kind", "as it resumes", 3, num_surfaced=3, num_completed=0)


async def test_tasks_below_the_request_belong_to_it_and_no_others_do() -> None:
    async def scenario(target: Target) -> object:
        async with trio.open_nursery() as beside:
            beside.start_soon(trio.sleep, 0)
            with target.here():
                async with trio.open_nursery() as below:
                    below.start_soon(trio.lowlevel.checkpoint)
                return "result"
        return None

    (waiting,) = await cover(scenario, WAITING)
    assert waiting.num_checkpoints == 2  # the child's, and the nursery's end


async def test_the_steps_of_others_count_where_that_is_asked_for() -> None:
    async def scenario(target: Target) -> object:
        async with trio.open_nursery() as beside:
            with target.here():
                done = trio.Event()
                beside.start_soon(checkpoints_then, done)
                await done.wait()
                return "result"
        return None

    async def checkpoints_then(done: trio.Event) -> None:
        for _ in range(5):
            await trio.lowlevel.checkpoint()
        done.set()

    waiting, resuming, between = await cover(scenario, WAITING, RESUMING, BETWEEN)
    assert waiting == Coverage("a kind", "as it waits", 1, num_surfaced=1, num_completed=0)
    # Whoever has resumed from the last wait has got what it waited for.
    assert resuming == Coverage("a kind", "as it resumes", 1, num_surfaced=0, num_completed=1)
    assert between.num_checkpoints >= 6


async def test_a_wrong_result_of_an_undisturbed_run_is_told() -> None:
    with pytest.raises(LeakError, match="undisturbed: expected 'another', got 'result'"):
        await cover(three_checkpoints, expected="another")


async def test_an_error_of_the_request_is_no_cancellation_and_passes() -> None:
    async def scenario(target: Target) -> object:
        with target.here():
            try:
                await trio.lowlevel.checkpoint()
            finally:
                if target.scope.cancel_called:
                    raise LookupError("in the clean-up")
            return "result"
        return None

    with pytest.raises(LookupError, match="in the clean-up"):
        await cover(scenario)


async def test_a_request_that_swallows_its_cancellation_is_found() -> None:
    async def scenario(target: Target) -> object:
        with target.here():
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
                await trio.lowlevel.checkpoint()
            return "result"
        return None

    with pytest.raises(LeakError, match=r"checkpoint 1 \(as it waits\): the cancellation was swallowed"):
        await cover(scenario)


async def test_a_request_that_ends_early_as_if_nothing_were_is_found() -> None:
    async def scenario(target: Target) -> object:
        with target.here():
            with suppress(trio.Cancelled):
                await trio.sleep(0.001)
                return "result"
            return "half of it"
        return None

    with pytest.raises(LeakError, match="swallowed, and the result is 'half of it'"):
        await cover(scenario)


async def test_a_run_that_hangs_is_found() -> None:
    async def scenario(target: Target) -> object:
        with target.here():
            await trio.lowlevel.checkpoint()
            return "result"
        return await trio.sleep_forever()

    with pytest.raises(LeakError, match="does not end"):
        await cancel_everywhere("a kind", QuietWorld(), scenario, "result", patience=0.01)


async def test_more_checkpoints_than_allowed_are_an_error() -> None:
    with pytest.raises(LeakError, match="more than 2 checkpoints"):
        await cancel_everywhere("a kind", QuietWorld(), three_checkpoints, "result", limit=2)


# What a broken request leaves, whatever it has to do with an engine


@pytest.fixture
def clean_up() -> Iterator[list[Callable[[], object]]]:
    calls: list[Callable[[], object]] = []
    yield calls
    for call in calls:
        call()


def leak_a_task(_: list[Callable[[], object]]) -> None:
    trio.lowlevel.spawn_system_task(trio.sleep_forever, name="the leaked task")


def leak_a_thread(clean_up: list[Callable[[], object]]) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="the leaked thread")
    thread.start()
    clean_up += [done.set, thread.join]


def leak_files(clean_up: list[Callable[[], object]]) -> None:
    clean_up += [partial(os.close, fd) for fd in os.pipe()]


@pytest.mark.parametrize(
    ("leak", "told"),
    [
        (leak_a_task, r"'tasks': \['the leaked task'\]"),
        (leak_a_thread, "'threads'.*the leaked thread"),
        (leak_files, "'fds'.*pipe:"),
    ],
)
async def test_what_is_left_after_a_cancellation_is_named(
    leak: Callable[[list[Callable[[], object]]], None], told: str, clean_up: list[Callable[[], object]]
) -> None:
    async def scenario(target: Target) -> object:
        with target.here():
            await trio.lowlevel.checkpoint()
            try:
                await trio.lowlevel.checkpoint()
            except trio.Cancelled:
                leak(clean_up)
                raise
            return "result"
        return None

    with pytest.raises(LeakError, match=rf"a kind, checkpoint 2 \(as it waits\): left behind: .*{told}"):
        await cover(scenario)


# An abort that is broken on purpose


async def cover_request(world: EngineWorld, name: str, **options: Any) -> None:
    (kind,) = [kind for kind in LIBRARY if kind.name == name]
    await cancel_everywhere(
        name, world, partial(kind.run, world), await kind.expected(world), **{"patience": 5, **options}
    )


async def test_a_release_that_aborts_nothing_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = OutputProcessor.release

    def forget_to_abort(outputs: OutputProcessor, channel: OutputChannel) -> list[int]:
        release(outputs, channel)
        return []

    monkeypatch.setattr(OutputProcessor, "release", forget_to_abort)
    async with ScriptedWorld.open(tmp_path, monkeypatch) as world:
        with pytest.raises(LeakError, match=r"complete, checkpoint 1 .*: 1 sequences go on"):
            await cover_request(world, "complete")


async def test_an_abort_that_is_never_sent_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedWorld.open(tmp_path, monkeypatch) as world:
        monkeypatch.setattr(world.client, "abort", lambda _: None)
        with pytest.raises(LeakError, match=r"stream, deltas, checkpoint 1 .as it waits.: 1 sequences go on"):
            await cover_request(world, "stream, deltas")


async def test_an_abort_of_one_of_n_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedWorld.open(tmp_path, monkeypatch) as world:
        abort = world.client.abort
        monkeypatch.setattr(world.client, "abort", lambda request_ids: abort(request_ids[:1]))
        with pytest.raises(LeakError, match="2 sequences go on in the engine"):
            await cover_request(world, "stream, n=3")


async def test_an_abort_that_is_sent_twice_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedWorld.open(tmp_path, monkeypatch) as world:
        abort = world.client.abort
        monkeypatch.setattr(world.client, "abort", lambda request_ids: abort(request_ids * 2))
        with pytest.raises(LeakError, match="aborts that came twice"):
            await cover_request(world, "complete")


async def test_an_abort_of_somebody_elses_request_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = OutputProcessor.release

    def release_everything(outputs: OutputProcessor, channel: OutputChannel) -> list[int]:
        return [*release(outputs, channel), *outputs.abort_all()]

    monkeypatch.setattr(OutputProcessor, "release", release_everything)
    async with ScriptedWorld.open(tmp_path, monkeypatch) as world:
        with pytest.raises(LeakError, match=r"a neighbour got .* instead of"):
            await cover_request(world, "complete")


async def test_an_entry_that_stays_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = OutputProcessor.release

    def release_and_keep(outputs: OutputProcessor, channel: OutputChannel) -> list[int]:
        unfinished = release(outputs, channel)
        outputs._channels[channel] = []
        return unfinished

    monkeypatch.setattr(OutputProcessor, "release", release_and_keep)
    async with ScriptedWorld.open(tmp_path, monkeypatch) as world:
        with pytest.raises(LeakError, match=r"left behind: {'open requests': "):
            await cover_request(world, "stream, deltas")


async def test_a_checkpoint_after_the_registration_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At this one checkpoint alone, the request is known and nobody can release it yet."""
    submit = AsyncLLM.submit

    async def submit_and_wait(llm: AsyncLLM, *args: Any, **options: Any) -> OutputChannel:
        channel = await submit(llm, *args, **options)
        await trio.lowlevel.checkpoint()
        return channel

    monkeypatch.setattr(AsyncLLM, "submit", submit_and_wait)
    async with ScriptedWorld.open(tmp_path, monkeypatch) as world:
        with pytest.raises(LeakError, match=r"checkpoint 1 \(as it waits\): 1 sequences go on in the engine"):
            await cover_request(world, "submit and release")


async def test_a_cancellation_that_is_swallowed_while_it_waits_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = OutputChannel.wait

    async def wait_in_any_case(channel: OutputChannel) -> None:
        with trio.CancelScope(shield=True):
            await wait(channel)

    monkeypatch.setattr(OutputChannel, "wait", wait_in_any_case)
    async with ScriptedWorld.open(tmp_path, monkeypatch) as world:
        with pytest.raises(LeakError, match="the cancellation was swallowed"):
            await cover_request(world, "stream, deltas")


async def test_a_task_that_outlives_its_response_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = App.__call__

    async def serve_and_leak(app: App, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            trio.lowlevel.spawn_system_task(trio.sleep_forever, name="the leaked task")
        await serve(app, scope, receive, send)

    monkeypatch.setattr(App, "__call__", serve_and_leak)
    (kind,) = [kind for kind in HTTP if kind.name == "chat, stream"]
    async with ScriptedWorld.open(tmp_path, monkeypatch) as world, open_site(world.llm) as site:
        with pytest.raises(LeakError, match=r"'tasks': \['the leaked task'\]"):
            await cancel_everywhere("HTTP", world, partial(site.ask, kind), await kind.expected(world))


async def test_a_sequence_that_goes_on_in_the_core_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineCore, "abort", lambda *_: None)
    async with open_hash_llm(tmp_path, monkeypatch) as llm:
        world = CoreWorld(llm, is_process=False)
        with pytest.raises(LeakError, match=r"complete, checkpoint 1 .*: 1 sequences go on in the engine"):
            await cover_request(world, "complete")


async def test_a_block_that_stays_held_in_the_core_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = KVCacheManager.free

    def free_what_was_not_aborted(cache: KVCacheManager, request: Any) -> None:
        if request.status is not RequestStatus.ABORTED:
            free(cache, request)

    monkeypatch.setattr(KVCacheManager, "free", free_what_was_not_aborted)
    async with open_hash_llm(tmp_path, monkeypatch) as llm:
        world = CoreWorld(llm, is_process=False)
        with pytest.raises(LeakError, match=r"stream, deltas, checkpoint .*'share of blocks held'"):
            await cover_request(world, "stream, deltas")


# The report


def test_the_table_says_what_was_covered_and_what_was_not() -> None:
    rows = [
        Row("script", "chat", {"as it waits": (3, 2, 1), "its client leaves": (2, 2, 0)}),
        Row("script", "beam", {"as it waits": (0, 0, 0)}),
    ]
    assert list(table(rows)) == [
        "| engine | kind | as it waits | its client leaves | all cancelled |",
        "| --- | --- | --- | --- | --- |",
        "| script | chat | 3 (2 + 1) | 2 (2 + 0) | yes |",
        "| script | beam | 0 (0 + 0) | - | NO |",
        "5 runs, each cancelled at a checkpoint of its own.",
    ]
