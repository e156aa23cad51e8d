"""From step outputs to each request's channel."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import attrs

from trioserve.errors import ClosedError, InvalidRequestError
from trioserve.frontend.channel import OutputChannel
from trioserve.frontend.completion import Completion
from trioserve.frontend.pooled_completion import PooledCompletion, no_result
from trioserve.link.columns import unpack_freed, unpack_step
from trioserve.link.messages import Refused, StepOutputs
from trioserve.link.pooling_columns import unpack_pooled
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from trioserve.frontend.admission import Admission
    from trioserve.link.columns import RequestUpdate
    from trioserve.link.messages import PooledOutputs
    from trioserve.observability.metrics import EngineMetrics

__all__ = ["OutputProcessor"]

log = logging.getLogger(__name__)


@attrs.define(eq=False)
class _Sequence:
    channel: OutputChannel
    completion: Completion
    last_token_time: float | None = None


class OutputProcessor:
    """All requests that are under way on one engine.

    Everything here is synchronous and belongs to the loop's thread. An engine knows sequences (one per
    completion) by numbers; a user knows requests by names, which need not be unique.
    """

    def __init__(self, metrics: EngineMetrics, admission: Admission) -> None:
        self.admission = admission
        self._metrics = metrics
        # Invariant: a sequence is here from `register` until it has ended or been released, and its channel
        # in _channels from `register` to `release`. Empty when no scope is open.
        self._sequences: dict[int, _Sequence] = {}
        self._channels: dict[OutputChannel, list[int]] = {}
        # When the abort of a sequence was sent that the engine has not reported as free yet: bounded by those
        # it knows, and empty without an engine.
        self._aborted: dict[int, float] = {}

    @property
    def num_unfreed(self) -> int:
        """Aborted sequences of which the engine has not said yet that they are free."""
        return len(self._aborted)

    @property
    def num_requests(self) -> int:
        """Channels that have not been released."""
        return len(self._channels)

    def register(self, channel: OutputChannel, sequence_ids: Mapping[int, Completion]) -> None:
        """Route what comes for these sequences to `channel`, until `release`. Again for each of its rounds,
        when the sequences of the one before have ended or are gone with their engine."""
        for sequence_id in self._channels.get(channel, ()):
            self._sequences.pop(sequence_id, None)
        self._channels[channel] = list(sequence_ids)
        for sequence_id, completion in sequence_ids.items():
            self._sequences[sequence_id] = _Sequence(channel, completion)

    def live_sequences(self, channel: OutputChannel) -> list[int]:
        """Those of `channel` that have not ended; none once it was released."""
        return [number for number in self._channels.get(channel, ()) if number in self._sequences]

    def release(self, channel: OutputChannel) -> list[int]:
        """Forget `channel`. Returns the sequences that the engine must abort; a second call finds none."""
        unfinished = []
        for sequence_id in self._channels.pop(channel, ()):
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is not None:
                unfinished.append(sequence_id)
                self._end(sequence, FinishReason.ABORT)
        channel.adds = ()
        if channel.place is not None:
            channel.place.close()
        if unfinished or channel.expects_input:  # for whoever still reads it, against all advice
            channel.watcher = None
            channel.fail(ClosedError("The request's scope has ended."))
        return unfinished

    def abort(self, request_ids: Container[str]) -> list[int]:
        """End every request of these names with finish reason ABORT; its consumer gets what is there, and the
        end. Returns the sequences that the engine must abort."""
        named = [channel for channel in self._channels if channel.request_id in request_ids]
        return self._abort_channels(named)

    def abort_all(self) -> list[int]:
        """`abort` of every request."""
        return self._abort_channels(self._channels)

    def _abort_channels(self, channels: Iterable[OutputChannel]) -> list[int]:
        aborted: list[int] = []
        for channel in channels:
            channel.was_aborted = True
            aborted += [number for number in self._channels[channel] if self._abort_sequence(number)]
            channel.notify()
        return aborted

    def _abort_sequence(self, sequence_id: int) -> bool:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return False
        sequence.completion.finish(FinishReason.ABORT)
        self._end(sequence, FinishReason.ABORT)
        return True

    def fail_all(self, error: Exception, *, keep: bool = False) -> list[OutputChannel]:
        """The engine is gone: raise `error` at every consumer that still waits for something; with `keep`,
        not at those whose round can start anew. Returns these; they are to be registered again."""
        self._aborted.clear()
        kept = []
        for channel in self._channels:
            if keep and channel.can_start_anew:
                kept.append(channel)
            else:
                self._fail(channel, error)
        return kept

    def _fail(self, channel: OutputChannel, error: Exception) -> None:
        for sequence_id in self.live_sequences(channel):
            self._end(self._sequences.pop(sequence_id), FinishReason.ERROR)
        channel.adds = ()
        if not channel.finished:
            channel.fail(type(error)(*error.args))  # its own copy: each consumer adds to the traceback

    def process(self, message: StepOutputs | Refused | PooledOutputs) -> list[int]:
        """Take in what the engine sent. Returns the sequences that ended here and not in the engine (by a
        stop string, by an error of ours, by a refusal of another one of the same request): the engine must
        abort them.

        Raises:
          MessageError: the step is malformed; nothing of it was taken in.
        """
        if isinstance(message, StepOutputs):
            to_abort = self._process_step(message)
        elif isinstance(message, Refused):
            to_abort = self._refuse(message)
        else:
            self._process_pooled(message)
            to_abort = []
        self.note_aborts(to_abort)
        return to_abort

    def note_aborts(self, sequence_ids: Iterable[int]) -> None:
        """The engine is told now to abort these."""
        now = time.monotonic()
        for sequence_id in sequence_ids:
            self._aborted[sequence_id] = now

    def _refuse(self, refused: Refused) -> list[int]:
        """The request was wrong, as its consumer hears once, however many completions it has. It counts for
        the metrics as little as one that was refused before the engine saw it."""
        sequence = self._sequences.get(refused.request_id)
        if sequence is None:
            return []  # released meanwhile, or refused with another completion already
        siblings = []
        for number in self._channels[sequence.channel]:
            if (sibling := self._sequences.pop(number, None)) is not None:
                self._leave(sibling)
                if number != refused.request_id:
                    siblings.append(number)
        sequence.channel.adds = ()
        sequence.channel.fail(InvalidRequestError(refused.message, parameter=refused.parameter))
        return siblings

    def _process_step(self, outputs: StepOutputs) -> list[int]:
        updates, freed = list(unpack_step(outputs)), unpack_freed(outputs)
        self._metrics.record_stats(outputs.stats)
        self.admission.update(outputs.stats)
        now = time.monotonic()
        self._note_freed(freed, now)
        to_abort: list[int] = []
        touched: dict[OutputChannel, None] = {}
        gaps: dict[float, int] = {}
        for update in updates:
            sequence = self._sequences.get(update.request_id)
            if sequence is None:
                continue  # released while the step ran
            touched[sequence.channel] = None
            sequence.channel.adds = ()
            self._note_times(sequence, update, now, gaps)
            if update.prompt_logprobs and sequence.channel.prompt_logprobs is not None:
                sequence.channel.prompt_logprobs.push(update.prompt_logprobs)
            self._push(sequence.completion, update)
            if sequence.completion.finish_reason is not None:
                del self._sequences[update.request_id]
                self._end(sequence, sequence.completion.finish_reason)
                if update.finish_reason is None:
                    to_abort.append(update.request_id)
        for seconds, count in gaps.items():
            self._metrics.record_inter_token(seconds, count)
        for channel in touched:
            channel.notify()
        return to_abort

    def _process_pooled(self, outputs: PooledOutputs) -> None:
        texts, freed = unpack_pooled(outputs), unpack_freed(outputs)
        self._metrics.record_stats(outputs.stats)
        self.admission.update(outputs.stats)
        self._note_freed(freed, time.monotonic())
        touched: dict[OutputChannel, set[int]] = {}
        for text in texts:
            sequence = self._sequences.pop(text.request_id, None)
            if sequence is None:
                continue  # released while the step ran
            assert isinstance(sequence.completion, PooledCompletion), "only such are sent to be pooled"
            touched.setdefault(sequence.channel, set()).add(text.request_id)
            sequence.completion.take_in(text)
            self._end(sequence, text.finish_reason)
            if text.output is None:
                sequence.channel.fail(no_result(text.finish_reason))
        for channel, ended in touched.items():
            channel.adds = [add for add in channel.adds if add.request_id not in ended]
            channel.notify()

    def _note_freed(self, sequence_ids: Iterable[int], now: float) -> None:
        for sequence_id in sequence_ids:
            if (aborted_at := self._aborted.pop(sequence_id, None)) is not None:
                self._metrics.record_abort_to_free(now - aborted_at)

    @staticmethod
    def _push(completion: Completion, update: RequestUpdate) -> None:
        try:
            completion.push(update)
        except Exception:  # a tokenizer's fault, say: this completion's end, and nobody else's
            log.exception("the output of sequence %d cannot be processed", update.request_id)
            completion.fail()

    def _note_times(
        self, sequence: _Sequence, update: RequestUpdate, now: float, gaps: dict[float, int]
    ) -> None:
        """Adds to `gaps`, seconds between tokens -> tokens: most sequences of a step have the same."""
        channel = sequence.channel
        if sequence.completion.index == 0:  # the others find what the first one has computed
            channel.num_cached_tokens = update.num_cached_tokens
        if not update.token_ids:
            return
        if channel.streams and channel.first_token_time is None:
            channel.first_token_time = now
            self._metrics.record_first_token(now - channel.arrival_time)
        if sequence.last_token_time is not None:
            count = len(update.token_ids)
            seconds = (now - sequence.last_token_time) / count
            gaps[seconds] = gaps.get(seconds, 0) + count
        sequence.last_token_time = channel.last_token_time = now

    def _end(self, sequence: _Sequence, reason: FinishReason) -> None:
        self._leave(sequence)
        channel = sequence.channel
        if channel.is_counted:
            seconds = time.monotonic() - channel.arrival_time
            completion = sequence.completion
            self.count_end(reason, completion.num_prompt_tokens, completion.num_tokens, seconds)

    @staticmethod
    def _leave(sequence: _Sequence) -> None:
        if sequence.channel.place is not None:
            sequence.channel.place.leave()

    def count_end(
        self, reason: FinishReason, num_prompt_tokens: int, num_generation_tokens: int, seconds: float
    ) -> None:
        """A request has ended, so long after it came: for the metrics."""
        self._metrics.record_finish(reason, num_prompt_tokens, num_generation_tokens, seconds)
