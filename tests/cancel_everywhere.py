"""A request of some kind, cancelled at its first, second, ... checkpoint, until one runs through.

After each of these runs everything must be as before: no entry, task, thread, child process or file
descriptor is left (I1, I2), the engine was told to stop what it had not ended (I4), and a neighbour that ran
all the while got exactly what it asked for. What is wrong is raised as `LeakError`, which names the kind, the
checkpoint and what was found.

A run's number of checkpoints may change from run to run, because trio shuffles the tasks that are ready. So a
kind is done when two runs in a row have ended before their checkpoint came.
"""

from __future__ import annotations

import gc
import inspect
import itertools
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from conftest import Belongings
from trioserve.nurseries import ungrouped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "ABORTED",
    "ABORTING",
    "BETWEEN",
    "LEAVING",
    "RESUMING",
    "WAITING",
    "BesideANeighbour",
    "Coverage",
    "LeakError",
    "Moment",
    "Scenario",
    "Target",
    "World",
    "cancel_everywhere",
]

_ROUNDS_TO_SETTLE = 25

ABORTED = "aborted"
"""The result of a request that was ended by its name."""


class LeakError(AssertionError):
    """A request that was cancelled has left something behind, or harmed another one."""


class Target:
    """The request of one run: the task it is in, and the scope that ends it.

    A scenario enters `here` once, in the request's own task. Whatever runs below that task, in nurseries that
    were opened there, is the request's as well.
    """

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.was_cancelled = False
        """A cancellation has surfaced in the request's task, and left it."""
        self.ended = trio.Event()
        self.leave: Callable[[], None] = self.cancel
        """What its client does to go away."""
        self.abort: Callable[[], None] = self.cancel
        """Ends it by its name."""
        self._task: trio.lowlevel.Task | None = None
        self._others: frozenset[trio.lowlevel.Nursery] = frozenset()  # the task's, opened before

    def cancel(self) -> None:
        self.scope.cancel()

    @contextmanager
    def here(self) -> Iterator[None]:
        assert self._task is None, "a scenario has one request"
        with self.scope:
            self._task = trio.lowlevel.current_task()
            self._others = frozenset(self._task.child_nurseries)
            try:
                yield
            except BaseException as error:
                self.was_cancelled = _is_cancellation(error)
                raise
            finally:
                self._task = None
                self.ended.set()

    @property
    def is_here(self) -> bool:
        """The request has begun and is not over."""
        return self._task is not None

    def is_in(self, task: trio.lowlevel.Task) -> bool:
        """`task` is the request's own, and it is not over."""
        return task is self._task

    def owns(self, task: trio.lowlevel.Task) -> bool:
        """`task` runs for the request, which is not over."""
        ancestor: trio.lowlevel.Task | None = task
        while ancestor is not None and ancestor is not self._task:
            nursery = ancestor.parent_nursery
            ancestor = None if nursery is None or nursery in self._others else nursery.parent_task
        return ancestor is not None


def _is_cancellation(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_cancellation, error.exceptions))
    return isinstance(error, trio.Cancelled)


@attrs.frozen
class Moment:
    """When, at a checkpoint, something happens to the request, and what."""

    name: str
    as_it_waits: bool
    """The checkpoint is interrupted. Otherwise the task was woken up already and gets what it waited for: a
    cancellation waits for its next checkpoint."""
    act: Callable[[Target], None]
    of_anybody: bool = False
    """Every task's steps count, for as long as the request is there: the engine's, the neighbour's."""


WAITING = Moment("as it waits", True, Target.cancel)
RESUMING = Moment("as it resumes", False, Target.cancel)
# Who waits once for a whole answer is struck by the ones above as it is sent, and as it comes. This strikes
# at each step of an engine in the same loop, too.
BETWEEN = Moment("after any task's step", True, Target.cancel, of_anybody=True)
LEAVING = Moment("its client leaves", True, lambda target: target.leave())
ABORTING = Moment("its name is aborted", True, lambda target: target.abort())


class _AtCheckpoint(trio.abc.Instrument):
    """Acts at the request's checkpoint of this number, which begin at 1; 0 is never."""

    def __init__(self, target: Target, moment: Moment, number: int) -> None:
        self.has_acted = False
        self.num_after = 0
        """Waits of the request's own task after that."""
        self._target = target
        self._moment = moment
        self._left = number

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if not self._moment.as_it_waits:
            self._count(task)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.num_after += self.has_acted and self._target.is_in(task)
        if self._moment.as_it_waits and inspect.getcoroutinestate(task.coro) != inspect.CORO_CLOSED:
            self._count(task)

    def _count(self, task: trio.lowlevel.Task) -> None:
        if self.has_acted or not self._counts(task):
            return
        self._left -= 1
        if self._left == 0:
            self.has_acted = True
            self._moment.act(self._target)

    def _counts(self, task: trio.lowlevel.Task) -> bool:
        return self._target.is_here if self._moment.of_anybody else self._target.owns(task)


@contextmanager
def _installed(instrument: trio.abc.Instrument) -> Iterator[None]:
    trio.lowlevel.add_instrument(instrument)
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(instrument)


class World(Protocol):
    """The engine under the requests, and what it knows of them."""

    async def run_beside(self, request: Callable[[], Awaitable[object]]) -> object:
        """Run `request` with a neighbour, and wait for that one's end. Raises LeakError if it was harmed."""

    async def find_leaks(self) -> Mapping[str, object]:
        """What is left of any request: what it is -> which. Empty when all is well."""

    async def rest(self) -> None:
        """Let what is still on its way arrive."""


class BesideANeighbour:
    """The part of a world that runs a request with a neighbour."""

    is_enough = False
    """The neighbour is to end."""

    async def run_beside(self, request: Callable[[], Awaitable[object]]) -> object:
        """See `World`."""
        self.is_enough = False
        with ungrouped():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._be_a_neighbour)
                result = await request()
                self.is_enough = True
        return result

    async def _be_a_neighbour(self) -> None:
        """Ask for the same again and again, until it is enough. Raises LeakError: something else came."""
        raise NotImplementedError


Scenario = Callable[[Target], Awaitable[object]]
"""Runs one request inside `target.here()` and returns its result; None if it has none."""


@attrs.define
class Coverage:
    """How often a kind of request was cancelled at a moment, and what came of it."""

    kind: str
    moment: str
    num_checkpoints: int = 0
    """All of them were struck, each in a run of its own."""
    num_surfaced: int = 0
    """In so many runs the cancellation left the request."""
    num_completed: int = 0
    """In so many the request had its result all the same: no checkpoint followed."""


async def cancel_everywhere(
    kind: str,
    world: World,
    scenario: Scenario,
    expected: object,
    *,
    moments: Sequence[Moment] = (WAITING, RESUMING),
    limit: int = 400,
    patience: float = 30,
    runs_are_costly: bool = False,
) -> list[Coverage]:
    """Run `scenario` undisturbed, then once for each checkpoint and moment. One `Coverage` per moment.

    Args:
      expected: the result of a run that is not disturbed.
      limit: a kind with more checkpoints than this is an error.
      patience: seconds for one run; one that needs longer hangs.
      runs_are_costly: leave out the undisturbed run, and be done when one run has ended before its checkpoint
        came, which is an undisturbed run as well.

    Raises:
      LeakError: something is left behind, or a result is wrong; the text says what, and where.
    """
    await world.rest()  # so that tasks of the engine's own have all begun
    runs = _Runs(kind, world, scenario, expected, patience, 1 if runs_are_costly else 2)
    if not runs_are_costly:
        await runs.undisturbed()
    return [await runs.at_each_checkpoint(moment, limit) for moment in moments]


@attrs.frozen
class _Runs:
    _kind: str
    _world: World
    _scenario: Scenario
    _expected: object
    _patience: float
    _enough_in_vain: int

    async def undisturbed(self) -> None:
        target = Target()
        result = await self._run(target, _AtCheckpoint(target, WAITING, 0), f"{self._kind}, undisturbed")
        if result != self._expected:
            raise LeakError(f"{self._kind}, undisturbed: expected {self._expected!r}, got {result!r}")

    async def at_each_checkpoint(self, moment: Moment, limit: int) -> Coverage:
        coverage = Coverage(self._kind, moment.name)
        num_in_vain = 0
        for number in itertools.count(1):
            if number > limit:
                raise LeakError(f"{self._kind}: more than {limit} checkpoints")
            num_in_vain = 0 if await self._strike(moment, number, coverage) else num_in_vain + 1
            if num_in_vain == self._enough_in_vain:
                break
        return coverage

    async def _strike(self, moment: Moment, number: int, coverage: Coverage) -> bool:
        """One run. False if it was over before the checkpoint."""
        where = f"{self._kind}, checkpoint {number} ({moment.name})"
        target = Target()
        instrument = _AtCheckpoint(target, moment, number)
        result = await self._run(target, instrument, where)
        if not instrument.has_acted and result != self._expected:
            raise LeakError(f"{where}: not disturbed, and got {result!r} instead of {self._expected!r}")
        if instrument.has_acted:
            coverage.num_checkpoints += 1
            coverage.num_surfaced += target.was_cancelled
            coverage.num_completed += not target.was_cancelled
            if not target.was_cancelled:
                self._check_result(moment, result, instrument.num_after, where)
        return instrument.has_acted

    def _check_result(self, moment: Moment, result: object, num_after: int, where: str) -> None:
        """Of a request that went on to its end."""
        if moment not in {LEAVING, ABORTING} and num_after:
            raise LeakError(f"{where}: the cancellation was swallowed, it waited {num_after} more times")
        others = {LEAVING: (None,), ABORTING: (ABORTED,)}.get(moment, ())
        if result != self._expected and result not in others:
            raise LeakError(f"{where}: the cancellation was swallowed, and the result is {result!r}")

    async def _run(self, target: Target, instrument: _AtCheckpoint, where: str) -> object:
        belongings, tasks = Belongings.now(), set(_all_tasks())
        try:
            with _installed(instrument), trio.fail_after(self._patience):
                result = await self._world.run_beside(lambda: self._scenario(target))
        except trio.TooSlowError:
            raise LeakError(f"{where}: it does not end") from None
        except LeakError as leak:
            raise LeakError(f"{where}: {leak}") from leak
        await self._settle(belongings, tasks, where)
        return result

    async def _settle(self, belongings: Belongings, tasks: set[trio.lowlevel.Task], where: str) -> None:
        for turn in range(_ROUNDS_TO_SETTLE):
            await self._world.rest()
            leaks = {
                **await self._world.find_leaks(),
                **Belongings.now().leaked_since(belongings),
                **({"tasks": left} if (left := _names(set(_all_tasks()) - tasks)) else {}),
            }
            if not leaks:
                return
            if turn % 8 == 7:
                gc.collect()
        raise LeakError(f"{where}: left behind: {leaks}")


def _names(tasks: set[trio.lowlevel.Task]) -> list[str]:
    return sorted(task.name for task in tasks)


def _all_tasks() -> Iterator[trio.lowlevel.Task]:
    waiting = [trio.lowlevel.current_root_task()]
    while waiting:
        task = waiting.pop()
        if task is not None:
            yield task
            waiting += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
