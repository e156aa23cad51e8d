"""The CPU engine's threads: all of them run, meet, sleep, and end with their pool."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from trioserve_kernels.native import Library, ThreadPool, available_tiers, load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

PROCESSORS = os.sched_getaffinity(0)
SIZES = [1, 2, 3, 8]


@pytest.fixture(params=available_tiers())
def library(request: pytest.FixtureRequest) -> Library:
    return load(request.param)


@pytest.fixture
def any_library() -> Library:
    if not available_tiers():
        pytest.skip("no library was built")
    return load(available_tiers()[0])


def call(pool: ThreadPool, name: str, *arguments: object) -> int:
    """One of `cpu/testing_pool.h`'s functions."""
    function = getattr(pool.library.functions, name)
    converted = [x.ctypes.data_as(ctypes.c_void_p) if isinstance(x, np.ndarray) else x for x in arguments]
    return int(function(ctypes.c_void_p(pool.handle), *converted) or 0)


def places(pool: ThreadPool) -> tuple[list[int], list[int]]:
    """Thread ids and processors of the members."""
    ids, processors = np.zeros(pool.threads, np.int32), np.zeros(pool.threads, np.int32)
    call(pool, "ts_test_places", ids, processors)
    return ids.tolist(), processors.tolist()


def tasks() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def status(task: int, field: str) -> str:
    lines = Path(f"/proc/self/task/{task}/status").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith(field + ":"))


# Running and meeting


@pytest.mark.parametrize("size", SIZES)
def test_no_member_goes_on_before_all_have_come(library: Library, size: int) -> None:
    rounds = 2000 if size <= len(PROCESSORS) else 200
    counters = np.zeros(size, np.int32)
    with ThreadPool(library, size) as pool:
        assert call(pool, "ts_test_meetings", ctypes.c_int32(rounds), counters) == 0
    assert counters.tolist() == [rounds] * size


@pytest.mark.parametrize("size", SIZES)
def test_every_run_is_everybodys(library: Library, size: int) -> None:
    runs = 5000 if size <= len(PROCESSORS) else 300
    counters = np.zeros(size, np.int32)
    with ThreadPool(library, size) as pool:
        call(pool, "ts_test_runs", ctypes.c_int32(runs), counters)
        assert counters.tolist() == [runs] * size
        for _ in range(5):
            time.sleep(0.01)  # members have gone to sleep
            call(pool, "ts_test_runs", ctypes.c_int32(1), counters)
    assert counters.tolist() == [runs + 5] * size


def test_two_pools_at_a_time(any_library: Library) -> None:
    counts: list[NDArray[np.int32]] = [np.zeros(2, np.int32) for _ in range(2)]

    def use(counters: NDArray[np.int32]) -> None:
        with ThreadPool(any_library, 2) as pool:
            assert call(pool, "ts_test_meetings", ctypes.c_int32(300), counters) == 0

    users = [threading.Thread(target=use, args=(counters,)) for counters in counts]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert [counters.tolist() for counters in counts] == [[300, 300], [300, 300]]


def test_bandwidth_is_measured(library: Library) -> None:
    with ThreadPool(library, 2) as pool:
        assert 1e8 < pool.read_bandwidth(4 << 20) < 1e13


# Where members run


@pytest.mark.parametrize("size", SIZES)
def test_the_caller_is_a_member_and_the_others_are_threads_of_the_pool(library: Library, size: int) -> None:
    before = tasks()
    with ThreadPool(library, size) as pool:
        ids, _ = places(pool)
        assert ids[0] == threading.get_native_id()
        assert set(ids[1:]) == tasks() - before
        assert len(set(ids)) == size


@pytest.fixture
def affinity() -> Iterator[None]:
    yield
    os.sched_setaffinity(0, PROCESSORS)


@pytest.mark.skipif(len(PROCESSORS) < 2, reason="needs two processors")
@pytest.mark.usefixtures("affinity")
def test_members_leave_the_caller_its_processor(any_library: Library) -> None:
    with ThreadPool(any_library, 2) as pool:
        member = places(pool)[0][1]
        for processor in sorted(PROCESSORS) * 2:
            os.sched_setaffinity(0, {processor})
            places(pool)
            (pinned,) = os.sched_getaffinity(member)
            assert pinned != processor


def test_the_caller_is_left_where_it_is(any_library: Library) -> None:
    with ThreadPool(any_library, len(PROCESSORS)) as pool:
        places(pool)
        assert os.sched_getaffinity(0) == PROCESSORS


def test_more_members_than_processors_are_not_pinned(any_library: Library) -> None:
    with ThreadPool(any_library, len(PROCESSORS) + 1) as pool:
        for member in places(pool)[0]:
            assert os.sched_getaffinity(member) == PROCESSORS


def test_idle_members_sleep(any_library: Library) -> None:
    with ThreadPool(any_library, 2) as pool:
        member = places(pool)[0][1]
        deadline = time.monotonic() + 20
        while not status(member, "State").startswith("S"):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_signals_are_for_pythons_threads(any_library: Library) -> None:
    with ThreadPool(any_library, 2) as pool:
        blocked = int(status(places(pool)[0][1], "SigBlk"), 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):
        assert blocked >> (number - 1) & 1
    assert not blocked >> (signal.SIGSEGV - 1) & 1  # it would be lost otherwise
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="elsewhere tiny numbers stay")
@pytest.mark.parametrize(("x", "y"), [(1e-30, 1e-10), (1e-40, 1e10)])
def test_numbers_too_small_for_normal_floats_are_zero_in_a_run(library: Library, x: float, y: float) -> None:
    products = np.ones(2, np.float32)
    with ThreadPool(library, 2) as pool:
        call(pool, "ts_test_multiply", ctypes.c_float(x), ctypes.c_float(y), products)
    assert products.tolist() == [0, 0]
    assert np.float32(x) * np.float32(y) > 0, "the caller's floats are as before"


# Ends


@pytest.mark.parametrize("size", SIZES)
def test_threads_end_with_their_pool(library: Library, size: int) -> None:
    before = tasks()
    for _ in range(3):
        with ThreadPool(library, size) as pool:
            places(pool)
        with ThreadPool(library, size):
            pass  # without a run
    assert tasks() == before


def test_threads_end_when_an_error_passes(any_library: Library) -> None:
    before = tasks()
    with pytest.raises(ZeroDivisionError), ThreadPool(any_library, 3):
        _ = 1 // 0
    assert tasks() == before


def test_a_closed_pool_stays_closed(any_library: Library) -> None:
    pool = ThreadPool(any_library, 2)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="this ThreadPool is closed"):
        pool.read_bandwidth(1 << 20)


def test_a_pool_that_nobody_closed_is_told_of(any_library: Library) -> None:
    before = tasks()
    pool = ThreadPool(any_library, 2)
    with pytest.warns(ResourceWarning, match="a ThreadPool was not closed"):
        del pool
    assert tasks() == before


PROGRAM = """
import sys, threading
from trioserve_kernels.native import ThreadPool, available_tiers, load

pool = ThreadPool(load(available_tiers()[0]), 3)
pool.read_bandwidth(1 << 20)
"""


def outcome(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(3)", 3),
        ("import os; os._exit(4)", 4),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("threading.Thread(target=pool.read_bandwidth, args=[1 << 28], daemon=True).start(); sys.exit(5)", 5),
    ],
)
def test_a_process_ends_with_members_asleep_or_at_work(any_library: Library, end: str, code: int) -> None:
    done = outcome(end)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer needs address space")
def test_a_system_that_refuses_threads(any_library: Library) -> None:
    limited = """
import os, resource
pool.close()
before = len(os.listdir("/proc/self/task"))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, 8 << 20))
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    ThreadPool(load(available_tiers()[0]), 500)
except OSError as error:
    print(error, len(os.listdir("/proc/self/task")) - before)
"""
    assert outcome(limited).stdout == "the system does not start 500 threads 0\n"
