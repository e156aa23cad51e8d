"""Portal: calls, errors, Ctrl-C in every surrounding, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from typing import TYPE_CHECKING

import pytest
import trio

from trioserve.errors import ClosedError
from trioserve.portal import Portal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture
def portal() -> Iterator[Portal]:
    with Portal() as portal:
        yield portal


async def add(a: int, b: int) -> int:
    await trio.lowlevel.checkpoint()
    return a + b


async def fail_deep_inside() -> None:
    raise LookupError("lost")


@contextlib.asynccontextmanager
async def recorded(name: str, log: list[str], error: Exception | None = None) -> AsyncIterator[str]:
    async with trio.open_nursery() as nursery:  # must be left by the task that entered it
        log.append(f"enter {name}")
        yield name
        log.append(f"leave {name}")
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error


def test_call_returns_the_result(portal: Portal) -> None:
    assert portal.call(add, 2, 3) == 5


def test_errors_keep_their_traceback(portal: Portal) -> None:
    with pytest.raises(LookupError, match="lost") as caught:
        portal.call(fail_deep_inside)
    names = [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert names[-1] == "fail_deep_inside"
    assert names[0] == "test_errors_keep_their_traceback"
    assert portal.call(add, 1, 1) == 2


def test_calls_from_several_threads_run_at_the_same_time(portal: Portal) -> None:
    arrived, everybody_here = [], trio.Event()

    async def meet() -> None:
        arrived.append(None)
        if len(arrived) == 3:
            everybody_here.set()
        await everybody_here.wait()

    threads = [threading.Thread(target=portal.call, args=(meet,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(arrived) == 3


def test_a_call_from_the_loops_own_thread_is_refused(portal: Portal) -> None:
    async def inside() -> None:
        portal.call(add, 1, 2)

    with pytest.raises(RuntimeError, match="own thread"):
        portal.call(inside)


def test_contexts_stay_open_and_are_left_newest_first() -> None:
    log: list[str] = []
    with Portal() as portal:
        assert portal.enter(recorded("a", log)) == "a"
        assert portal.enter(recorded("b", log)) == "b"
        portal.call(add, 1, 2)
        assert log == ["enter a", "enter b"]
    assert log == ["enter a", "enter b", "leave b", "leave a"]


def test_an_error_while_entering_goes_to_the_caller(portal: Portal) -> None:
    @contextlib.asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        await fail_deep_inside()
        yield

    with pytest.raises(LookupError, match="lost"):
        portal.enter(broken())
    assert portal.call(add, 1, 2) == 3


def test_close_reports_an_error_while_leaving_and_leaves_the_rest() -> None:
    log: list[str] = []
    portal = Portal()
    portal.enter(recorded("a", log))
    portal.enter(recorded("b", log, OSError("b is stuck")))
    with pytest.raises(OSError, match="b is stuck"):
        portal.close()
    assert log[-1] == "leave a"
    portal.close()


def test_a_context_that_fails_while_open_closes_the_portal() -> None:
    fail = trio.Event()

    @contextlib.asynccontextmanager
    async def failing() -> AsyncIterator[None]:
        async def fail_when_told() -> None:
            await fail.wait()
            raise OSError("gone")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_when_told)
            yield

    async def tell_and_wait() -> None:
        fail.set()
        await trio.sleep_forever()

    portal = Portal()
    portal.enter(failing())
    with pytest.raises(ClosedError) as caught:
        portal.call(tell_and_wait)
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    with pytest.raises(ClosedError):
        portal.call(add, 1, 2)
    with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="gone")):
        portal.close()


def test_close_cancels_calls_of_other_threads() -> None:
    portal = Portal()
    waiting = threading.Event()
    errors: list[BaseException] = []

    async def wait_forever() -> None:
        waiting.set()
        await trio.sleep_forever()

    def call() -> None:
        try:
            portal.call(wait_forever)
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    waiting.wait()
    portal.close()
    thread.join()
    assert len(errors) == 1


def test_nothing_is_left_after_close() -> None:
    fds, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    log: list[str] = []
    portal = Portal()
    portal.enter(recorded("a", log))
    portal.close()
    assert portal.closed
    assert set(os.listdir("/proc/self/fd")) == fds
    assert set(threading.enumerate()) == threads
    with pytest.raises(ClosedError):
        portal.call(add, 1, 2)


def test_a_portal_that_nobody_holds_closes_itself() -> None:
    log: list[str] = []
    portal = Portal()
    portal.enter(recorded("a", log))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "trioserve-loop"]
    del portal
    gc.collect()
    thread.join()
    assert log == ["enter a", "leave a"]


def test_a_handler_of_the_users_own_stays_in_charge(portal: Portal) -> None:
    class AlarmError(Exception):
        pass

    def sound(*_: object) -> None:
        raise AlarmError

    before = signal.signal(signal.SIGINT, sound)
    ended = threading.Event()
    noted = threading.Event()

    async def interrupt_and_wait() -> None:
        try:
            await interrupt()
            await trio.sleep_forever()
        finally:
            ended.set()

    async def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    async def interrupt_and_go_on() -> str:
        await interrupt()
        await trio.to_thread.run_sync(noted.wait)
        return "went on"

    try:
        with pytest.raises(AlarmError):
            portal.call(interrupt_and_wait)
        assert ended.is_set()
        signal.signal(signal.SIGINT, lambda *_: noted.set())
        assert portal.call(interrupt_and_go_on) == "went on"
    finally:
        signal.signal(signal.SIGINT, before)


# The scripts below interrupt themselves from inside the call, so the call is known to be in progress.
PRELUDE = """
import asyncio, os, signal, sys, threading, trio
from trioserve.errors import ClosedError
from trioserve.portal import Portal

async def interrupt_and_wait():
    try:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        await trio.sleep_forever()
    finally:
        print("work ended")

async def three():
    return 3

def interrupted_call(portal):
    try:
        portal.call(interrupt_and_wait)
    except KeyboardInterrupt:
        print("interrupted")
    print(portal.call(three))
"""


def run_script(body: str) -> subprocess.CompletedProcess[str]:
    script = PRELUDE + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=30, check=False
    )


SURROUNDINGS = {
    "plain": """
        with Portal() as portal:
            interrupted_call(portal)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        """,
    "asyncio.run": """
        async def main():
            before = signal.getsignal(signal.SIGINT)
            with Portal() as portal:
                interrupted_call(portal)
            assert signal.getsignal(signal.SIGINT) is before
            await asyncio.sleep(0)  # asyncio's handler was not told: its task is not cancelled

        asyncio.run(main())
        """,
    "a running loop with Python's own handler, as in Jupyter": """
        async def cell():
            with Portal() as portal:
                interrupted_call(portal)

        loop = asyncio.new_event_loop()
        loop.run_until_complete(cell())
        loop.close()
        """,
    "trio.run": """
        async def main():
            with Portal() as portal:
                interrupted_call(portal)

        trio.run(main)
        """,
}


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_ctrl_c_ends_the_work_and_the_portal_stays_usable(surrounding: str) -> None:
    done = run_script(SURROUNDINGS[surrounding])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n") == ["work ended", "interrupted", "3", ""]


def test_ctrl_c_while_entering_unwinds_the_context() -> None:
    done = run_script("""
        import contextlib

        @contextlib.asynccontextmanager
        async def slow_to_enter():
            async with trio.open_nursery():
                await interrupt_and_wait()
                yield

        with Portal() as portal:
            try:
                portal.enter(slow_to_enter())
            except KeyboardInterrupt:
                print("interrupted")
            print(portal.call(three))
        """)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["work", "ended", "interrupted", "3"]


def test_a_second_ctrl_c_does_not_wait_for_the_cleanup() -> None:
    done = run_script("""
        release = trio.Event()

        async def stubborn():
            try:
                await interrupt_and_wait()
            finally:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                with trio.CancelScope(shield=True):
                    await release.wait()
                print("cleaned up")

        with Portal() as portal:
            try:
                portal.call(stubborn)
            except KeyboardInterrupt:
                print("interrupted")

            async def let_go():
                release.set()
            portal.call(let_go)
        """)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n")[:3] == ["work ended", "interrupted", "cleaned up"]


def test_ctrl_c_does_not_touch_a_call_of_another_thread() -> None:
    done = run_script("""
        import queue
        interrupted, answers = threading.Event(), queue.SimpleQueue()

        async def interrupt_and_go_on():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await trio.to_thread.run_sync(interrupted.wait)
            return "went on"

        with Portal() as portal:
            thread = threading.Thread(target=lambda: answers.put(portal.call(interrupt_and_go_on)))
            try:
                thread.start()
                answers.get()
            except KeyboardInterrupt:
                interrupted.set()
                print(answers.get())
            print(portal.call(three))
        """)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n") == ["went on", "3", ""]


def test_a_script_that_never_closes_exits_and_leaves_its_contexts() -> None:
    done = run_script("""
        import contextlib

        @contextlib.asynccontextmanager
        async def held():
            yield
            await trio.sleep(0)
            print("left")

        portal = Portal()
        portal.enter(held())
        keep_it_past_the_end_of_main = [portal]
        """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


def test_a_thread_that_calls_past_the_end_of_main_is_told() -> None:
    done = run_script("""
        def call():
            try:
                portal.call(trio.sleep_forever)
            except ClosedError:
                print("closed")

        portal = Portal()
        threading.Thread(target=call).start()
        """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_an_error_that_no_close_reports_is_printed() -> None:
    done = run_script("""
        import contextlib

        @contextlib.asynccontextmanager
        async def held():
            yield
            raise OSError("could not be left")

        portal = Portal()
        portal.enter(held())
        """)
    assert "could not be left" in done.stderr


def test_a_forked_child_is_told() -> None:
    done = run_script("""
        with Portal() as portal:
            child = os.fork()
            if child == 0:
                try:
                    portal.call(three)
                except ClosedError:
                    os._exit(7)
                os._exit(1)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """)
    assert done.stdout == "7\n"
