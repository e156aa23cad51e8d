"""The door of an engine: who would have to wait behind too many others is refused before any work is done.

What is open is known exactly: every sequence has a place, from before its prompt is tokenized until it has
ended. What of it waits is estimated from what the engine core reported last:

    sequences that wait = open places - those that the engine can run at a time
    tokens that wait    = those of the waiting sequences, as reported, + those of sequences sent since then

As long as the core reports nobody who lacks a seat or blocks, it is taken to run `max_num_seqs` at a time,
so a burst on an idle engine fills its seats and then the queue. It may turn out that the KV cache holds
fewer: then up to `max_num_seqs` more wait than the limit says. Once the core has said so, no more are let in
than leave.

A report lags by what is on its way, a step at most. By then, sequences may run that it says wait: a request
is refused up to a step too early. Or sequences that it says run were aborted: one is let in for each, up to
a step before those that wait have moved up. In any case there are never more open sequences than
`max_num_seqs` + `max_num_queued_reqs`. And where none is open, what was reported of others is forgotten, and
only a request that could never fit is not let in.

A token waits from the moment its request is sent until the sequence begins, except those that the next step
will compute. The limit of tokens can be exceeded by one request, which is let in if nothing waits. Of a beam
search its prompt counts, and no later round. A piece of a prompt that is streamed is never refused: its
request is let in before any piece is known.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol, Self

import attrs

from trioserve.errors import InvalidRequestError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from trioserve.config import EngineConfig
    from trioserve.observability.metrics import EngineMetrics

__all__ = ["Admission", "Place"]

_RATE_WINDOW = 60.0
"""Seconds over which the rate at which sequences end is measured."""
_MAX_ENDS = 256
"""Ends that are remembered for that."""
_LEAST_RETRY_AFTER, _MOST_RETRY_AFTER = 1.0, 60.0


class Report(Protocol):
    """See `trioserve.core.stats.CoreStats`."""

    @property
    def num_running(self) -> int: ...
    @property
    def is_full(self) -> bool: ...
    @property
    def num_queued_tokens(self) -> int: ...
    @property
    def num_received(self) -> int: ...


@attrs.frozen
class _Reported:
    num_running: int = 0
    is_full: bool = False
    num_queued_tokens: int = 0


class Admission:
    """Knows how much is open on one engine, and who may still come. Synchronous; of the loop's thread."""

    def __init__(
        self, config: EngineConfig, metrics: EngineMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_queued = config.admission.max_num_queued_reqs
        self._max_queued_tokens = config.admission.max_num_queued_tokens
        self._num_seats = config.scheduler.max_num_seqs
        self._tokens_per_step = config.scheduler.max_num_batched_tokens
        self._metrics = metrics
        self._clock = clock
        # Invariant: the sum of all places' num_sequences. 0 when no scope is open.
        self.num_open = 0
        self._reported = _Reported()
        # The prompts' lengths of sequences that were sent and that no report has seen. Bounded by what the
        # link holds: the core reports what it received with its next step at the latest.
        self._unseen: deque[int] = deque()
        self._num_unseen_tokens = 0
        self._num_seen = 0
        self._ends: deque[float] = deque(maxlen=_MAX_ENDS)
        self._busy_since = clock()

    # What is open

    def reserve(self, num_sequences: int, *, parameter: str = "n") -> Place:
        """Take a place, which must be closed. Raises as `check` does."""
        self.check(num_sequences, parameter=parameter)
        if not self.num_open:
            self._busy_since = self._clock()
        self.num_open += num_sequences
        return Place(self, num_sequences)

    def leave(self, num_sequences: int) -> None:
        """So many sequences are gone."""
        self.num_open -= num_sequences
        now = self._clock()
        for _ in range(num_sequences):
            self._ends.append(now)

    # What the engine has of it

    def note_sent(self, num_tokens: int) -> None:
        """A sequence with such a prompt was sent to the core."""
        self._unseen.append(num_tokens)
        self._num_unseen_tokens += num_tokens

    def update(self, report: Report) -> None:
        """The core has reported."""
        self._reported = _Reported(report.num_running, report.is_full, report.num_queued_tokens)
        while self._num_seen < report.num_received and self._unseen:
            self._num_seen += 1
            self._num_unseen_tokens -= self._unseen.popleft()

    def reset(self) -> None:
        """The core is gone, and all that it had received; another one may come."""
        self._reported = _Reported()
        self._unseen.clear()
        self._num_unseen_tokens = self._num_seen = 0

    # Who may come

    def check(self, num_sequences: int, *, parameter: str = "n") -> None:
        """Whether a request may come, before anything is known of its prompts.

        Raises:
          InvalidRequestError: it is too large ever to be let in, by the parameter of this name.
          OverloadedError: there is no room at present.
        """
        if not self.num_open:
            self._forget_others()
        if self._max_queued is not None:
            self._check_sequences(num_sequences, self._max_queued, parameter)
        self.check_tokens(num_sequences)  # each has one at least

    def _forget_others(self) -> None:
        """What is known of the core is about sequences whose abort is on its way."""
        self._reported = _Reported()
        self._unseen = deque(0 for _ in self._unseen)
        self._num_unseen_tokens = 0

    def _check_sequences(self, num_sequences: int, limit: int, parameter: str) -> None:
        most = self._num_seats + limit
        if num_sequences > most:
            raise InvalidRequestError(
                f"The request has {num_sequences} sequences (prompts times n, or the beam width), and this "
                f"engine takes at most {most} at a time (max_num_seqs {self._num_seats} + "
                f"max_num_queued_reqs {limit}).",
                parameter=parameter,
            )
        num_queued = self._num_queued(num_sequences)
        if num_queued > limit:
            raise self._refusal(
                "queue_full",
                f"with this request, {num_queued} sequences would wait, and max_num_queued_reqs is {limit}.",
                num_leaving=num_queued - limit,
            )

    def check_tokens(self, num_tokens: int) -> None:
        """Whether a request with so many prompt tokens, all sequences together, may come.

        Raises:
          OverloadedError: too many wait already.
        """
        limit = self._max_queued_tokens
        if limit is None:
            return
        queued = self._num_queued_tokens
        excess = queued + num_tokens - limit
        if queued and excess > 0:
            raise self._refusal(
                "queued_tokens",
                f"{queued} prompt tokens are waiting already, and {num_tokens} more would exceed "
                f"max_num_queued_tokens ({limit}).",
                num_leaving=math.ceil(self._num_queued() * min(excess / queued, 1)),
            )

    def _num_queued(self, num_more: int = 0) -> int:
        reported = self._reported
        num_running = reported.num_running if reported.is_full else self._num_seats
        return max(0, self.num_open + num_more - num_running)

    @property
    def _num_queued_tokens(self) -> int:
        reported = self._reported
        queued = reported.num_queued_tokens + self._num_unseen_tokens
        return queued if reported.is_full else max(0, queued - self._tokens_per_step)

    def _refusal(self, reason: str, text: str, *, num_leaving: int) -> OverloadedError:
        self._metrics.record_refusal(reason)
        return OverloadedError(
            f"The engine is overloaded: {text} Try again later.", retry_after=self._seconds_until(num_leaving)
        )

    def _seconds_until(self, num_leaving: int) -> float:
        """How long it takes for so many sequences to end, at the rate of the last minute. Where none has
        ended in that time, one is taken to end now."""
        now = self._clock()
        start = max(self._busy_since, now - _RATE_WINDOW)
        if len(self._ends) == _MAX_ENDS:
            start = max(start, self._ends[0])
        num_ended = sum(end >= start for end in self._ends)
        seconds = num_leaving * (now - start) / max(num_ended, 1)
        return min(max(seconds, _LEAST_RETRY_AFTER), _MOST_RETRY_AFTER)


@attrs.define(eq=False)
class Place:
    """Room for a request's sequences, from before it is tokenized until the last of them has ended.

    A request that runs in rounds keeps it from its first to its last: none of them is refused.
    """

    _admission: Admission
    num_sequences: int
    """Those that have not ended. 0 once it is closed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def leave(self) -> None:
        """One of the sequences has ended."""
        if self.num_sequences:
            self.num_sequences -= 1
            self._admission.leave(1)

    def close(self) -> None:
        """All have ended, or will not be. A second call does nothing."""
        num_sequences, self.num_sequences = self.num_sequences, 0
        self._admission.leave(num_sequences)

    def hand_over(self) -> Place:
        """The same in the hands of another one, who must close it; this one is empty."""
        place = attrs.evolve(self)
        self.num_sequences = 0
        return place
