"""Every test is checked for what it leaves behind (threads, child processes, file descriptors), and for
answers that are not as described."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest

from cancel_report import pytest_terminal_summary  # noqa: F401 - a hook
from fake_engine import FakeEngine, open_fake_llm
from helpers_http import Probe
from helpers_tls import Authority
from response_checks import CHILDREN, FOLDER_VARIABLE, WrongAnswers, checking_all_answers
from served import STEADY, ServedModel, served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator


_LONG = (
    "test_greedy_equality.py",
    "test_soak.py",
    "test_schemathesis.py",
    "test_supervision_end_to_end.py",
    "test_sleep_end_to_end.py",
    "test_structured_end_to_end.py",
    "test_worker_native.py",
    "test_gguf_smollm2.py",
    "test_native_layers.py",
    "test_sampling_end_to_end.py",
)
"""Files that take half a minute or more, or much of it waiting: begun first, so that no processor is idle at
the end."""


def pytest_configure() -> None:
    """A shell's background jobs ignore Ctrl-C, and so would every process that the tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int | None:
    """One more than there are processors: many a test waits for a clock or a process."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: it is not searched for garbage, now or whenever that is collected later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))  # the others stay as they are


@attrs.frozen
class Belongings:
    """What a process holds."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    fds: frozenset[tuple[str, str]]

    @classmethod
    def now(cls) -> Belongings:
        return cls(
            # trio keeps idle worker threads for ten seconds; they are its own, and hold nothing of ours.
            frozenset(t for t in threading.enumerate() if not t.name.startswith("Trio thread")),
            frozenset(_children()),
            frozenset(_open_files()),
        )

    def leaked_since(self, before: Belongings) -> dict[str, object]:
        found = {
            "threads": self.threads - before.threads,
            "children": self.children - before.children,
            "fds": self.fds - before.fds,
        }
        return {what: which for what, which in found.items() if which}


def _children() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        try:
            yield from map(int, (task / "children").read_text().split())
        except FileNotFoundError:
            continue  # the thread ended meanwhile


def _open_files() -> Iterator[tuple[str, str]]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith(("socket:", "pipe:", "anon_inode:[eventpoll]", "anon_inode:[pidfd]")):
            yield entry.name, target


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = Belongings.now()
    yield
    leaked = Belongings.now().leaked_since(before)
    for _ in range(20):  # an exiting thread or a collected cycle needs a moment
        if not leaked:
            return
        gc.collect()
        time.sleep(0.01)
        leaked = Belongings.now().leaked_since(before)
    assert not leaked, f"left behind: {leaked}"


@pytest.fixture(scope="session", autouse=True)
def wrong_answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WrongAnswers]:
    """Those of applications, in this process and its children, that are not as described."""
    wrong = WrongAnswers(tmp_path_factory.mktemp("wrong-answers"))
    with pytest.MonkeyPatch.context() as patch, checking_all_answers(wrong):
        patch.setenv(FOLDER_VARIABLE, str(wrong.folder))
        patch.setenv("PYTHONPATH", str(CHILDREN), prepend=os.pathsep)
        yield wrong
    left = wrong.take()
    assert not left, "\n\n".join(left)


@pytest.fixture(autouse=True)
def answers_are_as_described(wrong_answers: WrongAnswers) -> Iterator[None]:
    yield
    found = wrong_answers.take()
    assert not found, "\n\n".join(found)


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeEngine]:
    """An AsyncLLM whose engine does what the test says."""
    async with open_fake_llm(tmp_path, monkeypatch) as engine:
        yield engine


@pytest.fixture
def probe() -> Probe:
    """An application that tells what becomes of its requests."""
    return Probe()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Makes certificates for this test."""
    return Authority(tmp_path)


@pytest.fixture
def own_children() -> Callable[[], set[int]]:
    """The child processes that the test has now, without those that were there before, such as `server`."""
    others = set(_children())
    return lambda: set(_children()) - others


@pytest.fixture
def same_number_of_threads() -> Iterator[None]:
    """Of torch's, afterwards as before."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """One server of the default model, for all tests that do not end it. It ends as a server should."""
    with served(tmp_path_factory.mktemp("server"), ["--dtype", STEADY]) as running:
        yield running
        running.wait_until_idle()
        assert running.terminate() == 0, running.log
        assert "Traceback" not in running.log, running.log
