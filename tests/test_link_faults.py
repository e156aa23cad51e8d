"""The link breaks at the first, second, ... message of a request, in every way: who hears of it, and what is
left."""

from __future__ import annotations

import itertools
import socket
from array import array
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from cancel_everywhere import Target
from cancel_kinds import LIBRARY, Kind
from cancel_worlds import CoreWorld, HashRunner, hash_answer, hash_model, patch_core, sampling
from link_faults import (
    DEADLY,
    HARMLESS,
    STALLED,
    TO_CLIENT,
    TO_CORE,
    WRONG_MESSAGE,
    Fault,
    Proxy,
    message_stream,
    open_llm_over,
    socket_stream,
)
from trioserve import EngineArgs, EngineDeadError, OverloadedError, RequestOutputKind
from trioserve.config import EngineConfig, ResolvedModel
from trioserve.frontend.output_processor import OutputProcessor
from trioserve.link import message_stream as link_message_stream
from trioserve.link.columns import unpack_step
from trioserve.link.core_server import serve_core
from trioserve.link.framing import frame
from trioserve.link.message_stream import MessageStream
from trioserve.link.messages import (
    PROTOCOL_VERSION,
    Abort,
    Add,
    Fatal,
    Hello,
    Message,
    StepOutputs,
    Utility,
    encode_message,
)
from trioserve.token_constraints import TokenConstraints
from trioserve.version import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from trioserve import AsyncLLM
    from trioserve.frontend.channel import OutputChannel

KINDS = [
    kind
    for kind in LIBRARY
    if kind.name in {"complete", "stream, n=3", "streaming input", "several in an embedder's scope"}
]
LONG = sampling(max_tokens=100, output_kind=RequestOutputKind.DELTA)


class Neighbour:
    """Reads a long answer, and notes how that ends."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.error: Exception | None = None
        self.ended = trio.Event()
        self._llm = llm

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        try:
            async with self._llm.stream("beside it", LONG) as outputs:
                task_status.started()
                async for _ in outputs:
                    pass
        except EngineDeadError as error:
            self.error = error
        finally:
            self.ended.set()


async def result_or_death(request: Callable[[], Awaitable[object]]) -> object:
    """What a request gives; the class EngineDeadError where it, or all of its parts, raised that."""
    result: object = EngineDeadError
    try:
        result = await request()
    except* EngineDeadError:
        pass
    return result


async def run_over(proxy: Proxy, kind: Kind, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of this kind over a link that will break, beside one that is under way all the time."""
    async with open_llm_over(proxy, directory, monkeypatch) as llm:
        world = CoreWorld(llm, is_process=False)
        expected = await kind.expected(world)
        neighbour = Neighbour(llm)
        async with trio.open_nursery() as nursery:
            await nursery.start(neighbour.run)
            proxy.arm()
            with trio.fail_after(10):
                result = await result_or_death(lambda: kind.run(world, Target()))
            proxy.disarm()
            assert result in (expected, EngineDeadError)
            if proxy.has_struck:
                with trio.fail_after(10):
                    await neighbour.ended.wait()
            nursery.cancel_scope.cancel()
        if proxy.has_struck:
            await check_that_it_is_dead(llm, neighbour)
        else:
            assert result == expected
        assert llm.num_open_requests == 0


async def check_that_it_is_dead(llm: AsyncLLM, neighbour: Neighbour) -> None:
    assert neighbour.error is not None
    assert llm.errored
    with pytest.raises(EngineDeadError):
        await llm.complete("x", sampling())
    with pytest.raises(EngineDeadError):
        await llm.check_health()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("direction", [TO_CLIENT, TO_CORE])
@pytest.mark.parametrize("name", [*(fault.name for fault in DEADLY), "a message of the wrong direction"])
async def test_a_broken_link_ends_every_request_and_leaves_nothing(
    name: str, direction: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = next((fault for fault in DEADLY if fault.name == name), WRONG_MESSAGE[direction])
    for number in itertools.count(1):
        proxy = Proxy(fault, direction, number)
        await run_over(proxy, kind, tmp_path, monkeypatch)
        if not proxy.has_struck:
            break
    assert number > 1, "nothing was sent"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("direction", [TO_CLIENT, TO_CORE])
@pytest.mark.parametrize("fault", HARMLESS, ids=lambda fault: fault.name)
async def test_a_slow_link_loses_nothing(
    fault: Fault, direction: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxy(fault, direction, None)
    async with open_llm_over(proxy, tmp_path, monkeypatch) as llm:
        proxy.arm()
        world = CoreWorld(llm, is_process=False)
        result = await world.run_beside(lambda: kind.run(world, Target()))
        assert result == await kind.expected(world)
        assert proxy.has_struck
        assert not llm.errored


@pytest.mark.parametrize("direction", [TO_CLIENT, TO_CORE])
async def test_a_core_that_does_not_answer_holds_nobody_who_leaves(
    direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxy(STALLED, direction, 1)
    async with open_llm_over(proxy, tmp_path, monkeypatch) as llm:
        proxy.arm()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(llm.complete, "x", LONG)
            await wait_all_tasks_blocked()
            assert llm.num_open_requests == 1
            nursery.cancel_scope.cancel()
        assert llm.num_open_requests == 0


async def submit_until_refused(llm: AsyncLLM) -> list[OutputChannel]:
    """Large requests."""
    channels: list[OutputChannel] = []
    try:
        while len(channels) < 1000:
            channels.append(await llm.submit("x", LONG, cache_salt="y" * 100_000))
            await trio.lowlevel.checkpoint()
    except OverloadedError:
        return channels
    raise AssertionError("all of them were taken")


async def test_a_core_that_does_not_read_is_sent_only_so_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxy(STALLED, TO_CORE, 1)
    async with open_llm_over(proxy, tmp_path, monkeypatch) as llm:
        proxy.arm()
        channels = await submit_until_refused(llm)
        assert channels
        for channel in channels:
            llm.release(channel)
        assert llm.num_open_requests == 0


async def test_a_fault_of_our_own_in_the_reader_ends_the_engine_with_that_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fault of the link: a bug. It is not taken for the engine's death, and nobody waits for ever."""

    def fail(*_: object) -> list[int]:
        raise LookupError("a bug")

    async def ask() -> None:
        async with open_llm_over(Proxy(STALLED, TO_CLIENT, 0), tmp_path, monkeypatch) as llm:
            monkeypatch.setattr(OutputProcessor, "process", fail)
            await llm.complete("x", LONG)

    with pytest.raises(LookupError, match="a bug"):
        await ask()


# The core's side


@attrs.define(eq=False)
class Core:
    """A core that is served over a socket pair, and the socket's other end."""

    near: trio.SocketStream
    runner: HashRunner
    config: EngineConfig
    model: ResolvedModel
    was_orderly: bool | None = None
    """What `serve_core` has returned."""
    ended: trio.Event = attrs.field(factory=trio.Event)

    async def serve(self, far: MessageStream) -> None:
        self.was_orderly = await serve_core(far)
        far.close()
        self.ended.set()

    def hello(self) -> Hello:
        return Hello(protocol=PROTOCOL_VERSION, version=__version__, config=self.config, model=self.model)

    async def read_to_the_end(self) -> list[Message]:
        stream = MessageStream(self.near)
        messages = []
        with trio.fail_after(10):
            while (message := await stream.receive()) is not None:
                messages.append(message)
            await self.ended.wait()
        return messages


@asynccontextmanager
async def open_core(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, send_buffer: int | None = None
) -> AsyncIterator[Core]:
    runner = HashRunner()
    patch_core(monkeypatch, runner)
    near, far = socket.socketpair()
    if send_buffer is not None:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    config = EngineArgs(model="hash").create_engine_config()
    core = Core(socket_stream(near), runner, config, hash_model(directory))
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(core.serve, message_stream(far))
            yield core
            nursery.cancel_scope.cancel()
    finally:
        near.close()
        core.near.socket.close()


def add(request_id: int, num_tokens: int = 100) -> Add:
    return Add(
        request_id=request_id,
        prompt_token_ids=array("i", [1, 2, 3]).tobytes(),
        params=sampling(max_tokens=num_tokens),
        constraints=TokenConstraints(),
        seed=0,
        streams=True,
        time_left=None,
    )


def script(core: Core) -> list[bytes]:
    """What a client sends, as frames."""
    messages = [core.hello(), add(1), add(2), Abort([1]), Utility(call_id=1, method="ping", args=[]), add(3)]
    return [frame(encode_message(message)) for message in messages]


@pytest.mark.parametrize("fault", [*DEADLY, WRONG_MESSAGE[TO_CORE]], ids=lambda fault: fault.name)
async def test_a_core_ends_at_what_it_cannot_read_and_says_so(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        async with open_core(tmp_path, monkeypatch) as core:
            *before, message = script(core)[: number + 1]
            await core.near.send_all(b"".join(before))
            await fault.strike(core.near, message)
            messages = await core.read_to_the_end()
            told = isinstance(messages[-1] if messages else None, Fatal)
            # A client may end a core in the middle of what it sends: once it is there, that is in order.
            is_in_order = fault.name == "end of file" or (fault.name.startswith("truncated") and number > 0)
            assert told is not is_in_order
            assert core.runner.is_closed is (number > 0)


async def test_a_core_that_has_failed_knows_it_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_core(tmp_path, monkeypatch) as core:
        await core.near.send_all(frame(b""))
        await core.read_to_the_end()
        assert core.was_orderly is False


@pytest.mark.parametrize("step", [1, 2, 3])
async def test_a_core_whose_step_fails_ends_and_says_so(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_core(tmp_path, monkeypatch) as core:
        execute = core.runner.execute

        def fail_at_step(batch: Any) -> Any:
            if len(core.runner.batches) == step - 1:
                raise MemoryError("no memory left")
            return execute(batch)

        core.runner.execute = fail_at_step  # type: ignore[method-assign]
        for message in (core.hello(), add(1)):
            await core.near.send_all(frame(encode_message(message)))
        *_, last = await core.read_to_the_end()
        assert isinstance(last, Fatal)
        assert last.message == "MemoryError: no memory left"
        assert core.runner.is_closed


@pytest.mark.parametrize("then", ["reads", "leaves"])
async def test_a_core_whose_client_does_not_read_waits_and_loses_nothing(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_message_stream, "_ROOM", 1000)
    async with open_core(tmp_path, monkeypatch, send_buffer=1) as core:
        for message in (core.hello(), add(1)):
            await core.near.send_all(frame(encode_message(message)))
        while not core.runner.batches:
            await wait_all_tasks_blocked()
        await wait_all_tasks_blocked(0.05)
        num_steps = len(core.runner.batches)
        assert num_steps < 100
        await wait_all_tasks_blocked(0.05)
        assert len(core.runner.batches) == num_steps
        if then == "reads":
            await check_that_all_comes(core)
        await core.near.send_eof()
        await core.read_to_the_end()
        assert core.was_orderly
        assert core.runner.is_closed


async def check_that_all_comes(core: Core) -> None:
    stream = MessageStream(core.near)
    tokens: list[int] = []
    with trio.fail_after(10):
        while len(tokens) < 100:
            message = await stream.receive()
            if isinstance(message, StepOutputs):
                tokens += [token for update in unpack_step(message) for token in update.token_ids]
    assert tokens == hash_answer([1, 2, 3], 100, 0)
