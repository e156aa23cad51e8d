"""The engine core at the other end of a link, with a model that is a hash function."""

from __future__ import annotations

import socket
from array import array
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from hash_model import EOS, VOCAB_SIZE, GrammarForm, HashGrammar
from helpers_core import PagedRunner
from trioserve.args import EngineArgs
from trioserve.config import GenerationDefaults, ResolvedModel
from trioserve.errors import EngineGenerateError, InvalidRequestError
from trioserve.link import core_server
from trioserve.link.columns import RequestUpdate, unpack_step
from trioserve.link.message_stream import MessageStream
from trioserve.link.messages import (
    PROTOCOL_VERSION,
    Abort,
    Add,
    Fatal,
    Hello,
    Message,
    Ready,
    Refused,
    StepOutputs,
    Utility,
    UtilityResult,
)
from trioserve.outputs import FinishReason
from trioserve.sampling_params import SamplingParams
from trioserve.structured_outputs import StructuredOutputsParams
from trioserve.token_constraints import TokenConstraints
from trioserve.version import __version__
from trioserve.worker.kv_layout import KVCacheLayout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from trioserve.core.stats import CoreStats

MODEL = ResolvedModel(
    directory="",
    tokenizer_directory="",
    architecture="HashForCausalLM",
    dtype="float32",
    vocab_size=VOCAB_SIZE,
    context_length=64,
    max_model_len=64,
    eos_token_ids=(EOS,),
    generation=GenerationDefaults(),
)
NUM_BLOCKS = 64
LAYOUT = KVCacheLayout(block_size=16)
ANY_GRAMMAR = StructuredOutputsParams(regex="a")


class Runner(PagedRunner):
    """Fails where it is told to."""

    bytes_per_block = 1

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, LAYOUT)
        self.error: Exception | None = None

    def execute(self, batch: Any) -> Any:
        if self.error is not None:
            raise self.error
        return super().execute(batch)

    def check_params(self, params: SamplingParams) -> None:
        pass

    def max_num_seqs(self, num_blocks: int) -> None:
        pass

    def close(self) -> None:
        pass


class Compiler:
    """Its grammars are ready when the test says so, or refused."""

    def __init__(self) -> None:
        self.ready = trio.Event()
        self.error: Exception | None = None
        self.num_waiting = 0

    def try_get(self, params: StructuredOutputsParams) -> None:
        return None

    async def compile(self, params: StructuredOutputsParams) -> HashGrammar:
        self.num_waiting += 1
        try:
            await self.ready.wait()
        finally:
            self.num_waiting -= 1
        if self.error is not None:
            raise self.error
        return HashGrammar(GrammarForm((3, 4)))


class Client:
    """The other end of the link: keeps all that it is sent."""

    def __init__(self, stream: MessageStream, runner: Runner, compiler: Compiler) -> None:
        self.runner = runner
        self.compiler = compiler
        self.messages: list[StepOutputs | Refused | UtilityResult | Fatal] = []
        """Without answers to pings."""
        self.ended = trio.Event()
        self._stream = stream
        self._pings: dict[int, trio.Event] = {}
        self._arrivals = trio.lowlevel.ParkingLot()

    async def read(self) -> None:
        while (message := await self._stream.receive()) is not None:
            if isinstance(message, UtilityResult) and message.call_id in self._pings:
                self._pings[message.call_id].set()
            else:
                self.messages.append(message)  # type: ignore[arg-type]
                self._arrivals.unpark_all()
        self.ended.set()
        for event in self._pings.values():
            event.set()

    async def send(self, *messages: Message) -> None:
        """And wait until the core has nothing to do any more, or its end."""
        for message in messages:
            self._stream.send_nowait(message)
        num_quiet = 0
        while num_quiet < 2 and not self.ended.is_set():
            before = len(self.messages)
            await self._ping()
            is_quiet = len(self.messages) == before + 1 and self.stats.num_running == 0
            num_quiet = num_quiet + 1 if is_quiet else 0

    async def until(self, is_true: Callable[[], bool], *messages: Message) -> None:
        """Send, and wait without asking for anything."""
        for message in messages:
            self._stream.send_nowait(message)
        with trio.fail_after(10):
            while not is_true():
                await self._arrivals.park()

    async def _ping(self) -> None:
        """One answer later, there is one more StepOutputs; and more, if there was news."""
        call_id = 1000 + len(self._pings)
        event = self._pings[call_id] = trio.Event()
        self._stream.send_nowait(utility(call_id, "ping"))
        await event.wait()

    async def hang_up(self) -> None:
        self._stream.shut_down_sending()
        await self.ended.wait()

    def updates(self, request_id: int) -> list[RequestUpdate]:
        steps = [message for message in self.messages if isinstance(message, StepOutputs)]
        return [u for step in steps for u in unpack_step(step) if u.request_id == request_id]

    @property
    def answers(self) -> list[int]:
        return [message.call_id for message in self.messages if isinstance(message, UtilityResult)]

    @property
    def num_waiting(self) -> int | None:
        """As the engine said last; None if it has said nothing yet."""
        steps = (message for message in reversed(self.messages) if isinstance(message, StepOutputs))
        return next((message.stats.num_waiting for message in steps), None)

    @property
    def stats(self) -> CoreStats:
        """The latest."""
        return next(message.stats for message in reversed(self.messages) if isinstance(message, StepOutputs))


@asynccontextmanager
async def connected(monkeypatch: pytest.MonkeyPatch, **args: Any) -> AsyncIterator[Client]:
    runner, compiler = Runner(), Compiler()

    @asynccontextmanager
    async def open_compiler(*_: object) -> AsyncIterator[Compiler]:
        yield compiler

    monkeypatch.setattr(core_server, "_load", lambda *_: (NUM_BLOCKS, runner))
    monkeypatch.setattr(core_server.GrammarCompiler, "open", open_compiler)
    near, far = map(_stream, socket.socketpair())
    config = EngineArgs(**args).create_engine_config()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_serve, far)
            nursery.start_soon(near.run_writer)
            near.send_nowait(
                Hello(protocol=PROTOCOL_VERSION, version=__version__, config=config, model=MODEL)
            )
            ready = await near.receive()
            assert isinstance(ready, Ready)
            assert ready.kernels == runner.kernels
            client = Client(near, runner, compiler)
            nursery.start_soon(client.read)
            yield client
            nursery.cancel_scope.cancel()
    finally:
        near.close()


async def _serve(far: MessageStream) -> None:
    try:
        await core_server.serve_core(far)
    finally:
        far.close()


def _stream(end: socket.socket) -> MessageStream:
    end.setblocking(False)
    return MessageStream(trio.SocketStream(trio.socket.from_stdlib_socket(end)))


def add(request_id: int, *, grammar: bool = False, time_left: float | None = None, **params: Any) -> Add:
    return Add(
        request_id=request_id,
        prompt_token_ids=array("i", [1, 2, 3]).tobytes(),
        params=SamplingParams(structured_outputs=ANY_GRAMMAR if grammar else None, **params),
        constraints=TokenConstraints(),
        seed=0,
        streams=True,
        time_left=time_left,
    )


def utility(call_id: int, method: str, *args: Any) -> Utility:
    return Utility(call_id=call_id, method=method, args=list(args))


async def test_a_request_whose_grammar_is_there_runs_to_the_end_of_the_match(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected(monkeypatch) as client:
        await client.send(add(7, grammar=True, max_tokens=9))
        assert client.updates(7) == []
        client.compiler.ready.set()
        await client.send()
        assert [token for update in client.updates(7) for token in update.token_ids] == [3, 4]
        assert client.updates(7)[-1].completes_grammar


async def test_an_abort_that_comes_together_with_the_grammar_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(monkeypatch) as client:
        await client.send(add(7, grammar=True, max_tokens=9))
        await _abort_as_the_grammar_comes(client, 7)
        assert client.compiler.num_waiting == 0
        assert client.updates(7) == []
        assert client.runner.batches == []


async def _abort_as_the_grammar_comes(client: Client, request_id: int) -> None:
    """The core reads the abort when the task that waits for the grammar has been woken up and not yet run."""
    original = core_server._Connection._abort

    def abort(connection: Any, request_ids: list[int]) -> None:
        client.compiler.ready.set()
        original(connection, request_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_server._Connection, "_abort", abort)
        await client.send(Abort([request_id]))


@pytest.mark.parametrize("end", ["runs", "is refused", "fails", "is aborted"])
async def test_drain_waits_for_a_request_without_its_grammar(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    async with connected(monkeypatch) as client:
        await client.send(add(7, grammar=True, max_tokens=9), utility(1, "drain"))
        assert client.answers == []
        if end == "is aborted":
            await client.send(Abort([7]))
        elif end == "is refused":
            client.compiler.error = InvalidRequestError("no", parameter="structured_outputs")
        elif end == "fails":
            client.compiler.error = EngineGenerateError("the child is gone")
        client.compiler.ready.set()
        await client.send()
        assert client.answers == [1]
        assert any(isinstance(message, Refused) for message in client.messages) == (end == "is refused")
        reasons = {"runs": [FinishReason.STOP], "fails": [FinishReason.ERROR]}
        assert [update.finish_reason for update in client.updates(7)] == reasons.get(end, [])
        assert client.stats.num_waiting == 0


async def test_who_waits_for_a_grammar_is_counted_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(monkeypatch) as client:
        adds = [add(number, grammar=True) for number in (7, 8, 9)]
        prompt_length = adds[0].num_prompt_tokens
        await client.until(lambda: client.num_waiting == 3, *adds)
        assert client.stats.num_queued_tokens == 3 * prompt_length
        await client.until(lambda: client.num_waiting == 2, Abort([7]))
        assert client.stats.num_queued_tokens == 2 * prompt_length
        client.compiler.error = EngineGenerateError("the child is gone")
        client.compiler.ready.set()
        await client.until(lambda: client.num_waiting == 0)
        assert client.stats.num_queued_tokens == 0
        assert client.stats.num_received == 3


async def test_drain_hears_of_a_request_that_comes_too_late_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends without a step, when nothing else happens. Which of the two messages is first is chance."""
    async with connected(monkeypatch, scheduling_policy="deadline") as client:
        for number in range(10):
            await client.send(add(number, time_left=0.0), utility(number, "drain"))
            assert [update.finish_reason for update in client.updates(number)] == [FinishReason.DEADLINE]
        assert client.answers == list(range(10))


async def test_a_failure_of_the_runner_is_told_though_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(monkeypatch) as client:
        await client.send(add(7, grammar=True), utility(1, "drain"))
        client.runner.error = MemoryError("no memory left")
        await client.send(add(8))
        last = client.messages[-1]
        assert isinstance(last, Fatal)
        assert last.message == "MemoryError: no memory left"
        assert "execute" in last.traceback
        assert client.compiler.num_waiting == 0


async def test_the_end_of_the_link_ends_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(monkeypatch) as client:
        await client.send(add(7, grammar=True), utility(1, "drain"), utility(2, "sleep", 1, "wait"))
        await client.hang_up()
        assert client.compiler.num_waiting == 0


async def test_what_a_process_does_once_it_is_ready_comes_after_the_client_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def settle() -> None:
        raise RuntimeError("settling failed")

    monkeypatch.setattr(core_server, "serve_core", partial(core_server.serve_core, on_ready=settle))
    async with connected(monkeypatch) as client:  # gets a Ready
        await client.ended.wait()
        [last] = client.messages
        assert isinstance(last, Fatal)
        assert "settling failed" in last.message
