"""The client's side of the link: what a frontend needs of an engine core, wherever that runs."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import trio

from trioserve.errors import EngineDeadError, EngineGenerateError, EngineStartError, OverloadedError
from trioserve.link.messages import (
    PROTOCOL_VERSION,
    Abort,
    Add,
    AddPooling,
    Fatal,
    Hello,
    MessageError,
    PooledOutputs,
    Ready,
    Refused,
    StepOutputs,
    Utility,
    UtilityResult,
)
from trioserve.version import __version__

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.errors import TrioserveError
    from trioserve.link.message_stream import MessageStream
    from trioserve.link.messages import Message

__all__ = ["EngineCoreClient", "config_hash", "shake_hands"]


def config_hash(config: EngineConfig, model: ResolvedModel) -> str:
    """Equal on both sides if both understood the same configuration."""
    return hashlib.sha256(msgspec.msgpack.encode((config, model))).hexdigest()


async def shake_hands(stream: MessageStream, config: EngineConfig, model: ResolvedModel) -> Ready:
    """Tell the core what to be, and wait until it is.

    Raises:
      EngineStartError: the core failed (its own reason is in the text), went away, or is another version.
    """
    stream.send_nowait(Hello(protocol=PROTOCOL_VERSION, version=__version__, config=config, model=model))
    try:
        answer = await stream.receive()
    except MessageError as error:
        raise EngineStartError(f"The engine core sent something unreadable: {error}") from error
    match answer:
        case Ready() if answer.protocol != PROTOCOL_VERSION or answer.version != __version__:
            raise EngineStartError(
                f"The engine core is version {answer.version} (protocol {answer.protocol}), "
                f"this is {__version__} (protocol {PROTOCOL_VERSION})."
            )
        case Ready() if answer.config_hash != config_hash(config, model):
            raise EngineStartError("The engine core understood another configuration than it was sent.")
        case Ready():
            return answer
        case Fatal():
            raise EngineStartError(f"The engine core could not start: {_describe(answer)}")
        case None:
            raise EngineStartError("The engine core ended before it was ready.")
        case _:
            raise EngineStartError(f"The engine core answered with {type(answer).__name__}.")


def _describe(fatal: Fatal) -> str:
    return f"{fatal.message}\n\n{fatal.traceback}".strip()


async def _nothing_to_reap() -> None:
    """The core has no process of its own."""


@attrs.define(eq=False)
class _PendingCall:
    done: trio.Event = attrs.Factory(trio.Event)
    result: UtilityResult | None = None


class EngineCoreClient:
    """One engine core that is ready.

    `add` and `abort` are synchronous: when they return, the message is on its way. One task, and only one,
    calls `receive` in a loop; calls made with `call` are answered through it.

    Once the core is gone, `receive`, `add` and `call` raise EngineDeadError; `abort` does nothing.
    """

    def __init__(
        self,
        stream: MessageStream,
        ready: Ready,
        reap: Callable[[], Awaitable[str | None]] = _nothing_to_reap,
    ) -> None:
        self.ready = ready
        self.reap = reap
        """See the core to its end, once it has failed: killed, if need be. Returns how its process ended, in
        words, or None if it has none. Cancelling is fine: the scope of this client does the rest."""
        self.ended_by_itself: str | None = None
        """Once the scope of this client has been left: how the core's process ended, if that was not what it
        had been asked for."""
        self._stream = stream
        self._calls: dict[int, _PendingCall] = {}  # one per task that waits in `call`
        self._next_call_id = 0
        self._end: TrioserveError | None = None

    def add(self, request: Add | AddPooling) -> None:
        """Start a sequence.

        Raises:
          EngineDeadError: there is no core any more.
          OverloadedError: it is too far behind in reading to be sent more.
        """
        self._check_alive()
        if not self._stream.has_room:
            raise OverloadedError("The engine core is too far behind to take another request.")
        self._stream.send_nowait(request)

    async def wait_room(self) -> None:
        """Until there is much room for `add`; no checkpoint where there is. For many requests that are large:
        `add` refuses what is too much. (Once the core is gone, there is room; `add` then says so.)"""
        await self._stream.wait_room()

    def add_again(self, request: Add | AddPooling) -> None:
        """As `add`, whether there is room or not: of one that another core took already, or of a request with
        many sequences of which the first one was taken."""
        self._check_alive()
        self._stream.send_nowait(request)

    def abort(self, request_ids: list[int]) -> None:
        """Stop sequences; those that have ended are ignored."""
        if request_ids and self._end is None:
            self._stream.send_nowait(Abort(request_ids))

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the core and wait for its result. Cancelling drops the result.

        Raises:
          EngineGenerateError: the method raised.
          EngineDeadError: there is no core any more.
        """
        self._check_alive()
        call_id, self._next_call_id = self._next_call_id, self._next_call_id + 1
        call = self._calls[call_id] = _PendingCall()
        try:
            self._stream.send_nowait(Utility(call_id=call_id, method=method, args=list(args)))
            await call.done.wait()
        finally:
            del self._calls[call_id]
        if call.result is None:
            self._check_alive()
            raise AssertionError("a call ends with a result or with the core")
        if call.result.error is not None:
            raise EngineGenerateError(f"{method}: {call.result.error}")
        return call.result.result

    def tell(self, method: str, *args: Any) -> None:
        """Call a method of the core, whatever becomes of it; nothing, where there is no core any more."""
        if self._end is None:
            call_id, self._next_call_id = self._next_call_id, self._next_call_id + 1
            self._stream.send_nowait(Utility(call_id=call_id, method=method, args=list(args)))

    async def receive(self) -> StepOutputs | Refused | PooledOutputs:
        """What the next step gave, or that a sequence is not run.

        Raises:
          EngineDeadError: the core is gone; from here on, every call says so.
        """
        while True:
            message = await self._receive()
            match message:
                case StepOutputs() | Refused() | PooledOutputs():
                    return message
                case UtilityResult():
                    self._answer(message)
                case Fatal():
                    raise self._die(f"The engine core failed: {_describe(message)}")
                case None:
                    raise self._die("The engine core ended unexpectedly.")
                case _:
                    raise self._die(f"The engine core sent an unexpected {type(message).__name__}.")

    async def _receive(self) -> Message | None:
        try:
            return await self._stream.receive()
        except MessageError as error:
            raise self._die(f"The engine core sent something unreadable: {error}") from error

    def _answer(self, result: UtilityResult) -> None:
        if (call := self._calls.get(result.call_id)) is not None:
            call.result = result
            call.done.set()

    def end(self, error: TrioserveError) -> None:
        """From here on, every call raises `error`, also those that wait for their result. The first end
        counts."""
        self._end = self._end or error
        for call in self._calls.values():
            call.done.set()

    def _die(self, reason: str) -> EngineDeadError:
        error = EngineDeadError(reason)
        self.end(error)
        return error

    def _check_alive(self) -> None:
        if self._end is not None:
            raise type(self._end)(*self._end.args)
