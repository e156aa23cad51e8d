"""A trio loop in a thread of its own, for callers that are not async.

How the thread ends when nobody calls `close()`: it is no daemon, as a daemon is frozen mid-step when the
interpreter exits and would leave its child process and files behind. `atexit` comes too late to stop it,
because the interpreter joins all other threads first. So the loop looks at the main thread a few times a
second and closes everything once that has ended; a `Portal` that is garbage-collected closes as well.

How Ctrl-C works: Python runs signal handlers in the main thread, where `call()` waits, and an exception out
of one may come at any bytecode. So for the time of a call the handler only cancels the call's scope, and
KeyboardInterrupt is raised after the call has ended. asyncio and trio have handlers of their own that wake a
task, which cannot run while its thread waits here; they are replaced for the time of a call, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar, TypeVarTuple

import attrs
import trio

from trioserve.errors import ClosedError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from types import FrameType, TracebackType
    from typing import Self

__all__ = ["Portal"]

T = TypeVar("T")
Args = TypeVarTuple("Args")

_MAIN_THREAD_POLL = 0.1  # seconds


class Portal:
    """Runs async functions from synchronous code, in a trio loop that lives until `close()`.

    Owns the thread "trioserve-loop". Any thread but that one may use it, several at a time too.
    """

    def __init__(self) -> None:
        self._loop = _Loop()
        self._thread = threading.Thread(target=self._loop.run, name="trioserve-loop", daemon=False)
        self._thread.start()
        self._loop.ready.wait()
        if self._loop.failure is not None:
            raise self._loop.failure
        # The thread knows the loop and not the portal, so a forgotten portal can be collected.
        self._finalizer = weakref.finalize(self, self._loop.abandon)
        self._finalizer.atexit = False

    def call(self, afn: Callable[[*Args], Awaitable[T]], *args: *Args) -> T:
        """Run `await afn(*args)` in the loop, wait for its end and return its result.

        What it raises is raised here, with its traceback. Ctrl-C in the main thread cancels it, waits for its
        end and raises KeyboardInterrupt, also under `asyncio.run` and in notebooks; a second Ctrl-C does not
        wait. A SIGINT handler of the user's own stays in charge; what it raises ends the call likewise.

        Raises:
          ClosedError: the portal is closed, or was closed during the call.
          RuntimeError: this is the loop's own thread, which must not wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("Portal.call() from the loop's own thread would wait for itself: use await")
        if self.closed:
            raise ClosedError("already closed") from self._loop.failure
        call = _Call(afn, args)
        with _SigintGuard(lambda: self._loop.post(call.cancel)) as guard:
            try:
                if not self._loop.post(self._loop.begin, call):
                    raise ClosedError("already closed")
                call.wait()
            except BaseException:  # a second Ctrl-C, or what a handler of the user's raised
                if not guard.interrupted and self._loop.post(call.cancel):
                    call.wait()
                raise
        if guard.interrupted:
            raise KeyboardInterrupt from call.error
        return self._result_of(call)

    def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter `context` in the loop; `close()` leaves it, the newest first. As `call()` in all else."""
        return self.call(self._loop.enter, context)

    def close(self) -> None:
        """Cancel the calls in progress, leave the contexts, end the thread. Again is fine, and does nothing.

        Raises what a context raised while it was open or being left.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("Portal.close() from the loop's own thread would wait for itself")
        self._finalizer.detach()
        self._loop.post(self._loop.stop)
        self._thread.join()
        failure, self._loop.failure = self._loop.failure, None
        if failure is not None:
            raise failure

    @property
    def closed(self) -> bool:
        """True once the thread has ended, also when a failure ended it, and in a forked child."""
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _result_of(self, call: _Call[T, *Args]) -> T:
        if call.error is not None:
            try:
                raise call.error
            finally:
                call.error = None  # breaks the cycle error -> traceback -> frame -> call -> error
        if not call.results:
            self._thread.join()
            raise ClosedError("closed during the call") from self._loop.failure
        return call.results.pop()


@attrs.define(eq=False)
class _Call(Generic[T, *Args]):
    afn: Callable[[*Args], Awaitable[T]]
    args: tuple[*Args]
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    # Held until the end. A lock, as threading.Event keeps its own lock if a signal handler raises in wait().
    _running: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _begun: bool = attrs.field(default=False, init=False)
    _ended: bool = attrs.field(default=False, init=False)
    # At the end at most one of these is set; neither if the call was cancelled.
    results: list[T] = attrs.field(factory=list, init=False)
    error: Exception | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._running.acquire()

    async def run(self) -> None:
        try:
            with self._scope:
                self.results.append(await self.afn(*self.args))
        except Exception as error:
            self.error = error  # whatever it is, it belongs to the caller
        finally:
            self.end()

    def begin(self, nursery: trio.Nursery) -> None:
        self._begun = True
        nursery.start_soon(self.run)

    def cancel(self) -> None:
        self._scope.cancel()
        if not self._begun:
            self.end()

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._running.release()

    def wait(self) -> None:
        """Until `end()`. In the caller's thread; again after an exception is fine."""
        if not self._ended:
            self._running.acquire()


@attrs.define(eq=False)
class _HeldContext:
    leave: trio.Event = attrs.field(factory=trio.Event)
    left: trio.Event = attrs.field(factory=trio.Event)


class _Loop:
    """What the thread runs. Only `post()` may be called from other threads."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.failure: Exception | None = None
        self._abandoned = False
        self._stop = trio.Event()
        self._held: list[_HeldContext] = []  # oldest first
        self._failures: list[Exception] = []  # of held contexts
        self._token: trio.lowlevel.TrioToken
        self._calls: trio.Nursery
        self._contexts: trio.Nursery

    def run(self) -> None:
        try:
            trio.run(self._main)
        except Exception as error:
            self.failure = error
            if self._abandoned:
                raise  # no close() will tell anybody, so let threading.excepthook
        finally:
            self.ready.set()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self._contexts:
            async with trio.open_nursery() as self._calls:
                self._calls.start_soon(self._watch_main_thread)
                self.ready.set()
                await self._stop.wait()
                self._calls.cancel_scope.cancel()
            for held in reversed(self._held):
                held.leave.set()
                await held.left.wait()
        if len(self._failures) == 1:
            raise self._failures[0]
        if self._failures:
            raise ExceptionGroup("several contexts failed", self._failures)

    async def _watch_main_thread(self) -> None:
        while threading.main_thread().is_alive():  # noqa: ASYNC110 - nothing announces its end
            await trio.sleep(_MAIN_THREAD_POLL)
        self._abandoned = True
        self.stop()

    def post(self, fn: Callable[[*Args], object], *args: *Args) -> bool:
        """Have the loop call `fn(*args)`; False if it has ended. Safe in signal handlers and finalizers."""
        try:
            self._token.run_sync_soon(fn, *args)
        except trio.RunFinishedError:
            return False
        return True

    def abandon(self) -> None:
        self._abandoned = True
        self.post(self.stop)

    def stop(self) -> None:
        self._stop.set()

    def begin(self, call: _Call[T, *Args]) -> None:
        if self._stop.is_set():
            call.end()
        else:
            call.begin(self._calls)

    async def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        value: T = await self._contexts.start(self._hold, context)
        return value

    async def _hold(
        self, context: AbstractAsyncContextManager[T], *, task_status: trio.TaskStatus[T]
    ) -> None:
        # A task per context: nurseries and scopes must be left by the task that entered them.
        held = _HeldContext()
        entered = False
        try:
            async with context as value:
                entered = True
                self._held.append(held)
                task_status.started(value)
                await held.leave.wait()
        except Exception as error:
            if not entered:
                raise  # to the caller of enter()
            self._failures.append(error)
            self.stop()
        finally:
            held.left.set()


class _SigintGuard(contextlib.AbstractContextManager["_SigintGuard"]):
    """Turns the first SIGINT inside it into `cancel()`, where Ctrl-C would have interrupted this thread."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.interrupted = False
        self._cancel = cancel
        self._replaced: Callable[[int, FrameType | None], object] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler) and (handler is signal.default_int_handler or _in_event_loop()):
                self._replaced = handler
                signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(self, *_: object) -> None:
        if self._replaced is not None:
            signal.signal(signal.SIGINT, self._replaced)

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        self._cancel()


def _in_event_loop() -> bool:
    """Does an event loop run in this thread? Its SIGINT handler wants to wake a task, and we block it."""
    if trio.lowlevel.in_trio_run():
        return True
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
