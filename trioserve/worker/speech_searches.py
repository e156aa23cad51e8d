"""Beam searches within steps: a sequence that is one becomes a sequence per beam, and gets a token per step.

To the scheduler, a search is a sequence as any other: it has a seat, gets a token in each step, and may be
aborted or preempted between any two. The token that it is told of is provisional (the likeliest beam's last),
so that it knows how far the search is; all of them are replaced at the end by the text that was found. The
search's blocks stay unused, and are small beside what its audio takes.

A search that a step does not have is forgotten: it has ended, or was preempted. If it comes back, it is done
again from its beginning to where it was, within one step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from trioserve.worker.batch import SampledToken, SequenceOutput, StepBatch
from trioserve.worker.speech_beams import SpeechBeams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trioserve.worker.batch import ScheduledSequence
    from trioserve.worker.beam_pages import BeamPages, PageCopy

__all__ = ["BeamExecutor", "SpeechSearches", "is_search"]


class BeamExecutor(Protocol):
    """An executor whose KV cache has pages for beams."""

    @property
    def beam_pages(self) -> BeamPages: ...

    def copy_pages(self, copies: Sequence[PageCopy]) -> None: ...


def is_search(sequence: ScheduledSequence) -> bool:
    return sequence.audio is not None and sequence.audio.search is not None


class _Search:
    """One search, and the pages of its beams.

    Invariant: `tables` has one entry per live beam, which covers all of it.
    """

    def __init__(self, sequence: ScheduledSequence, pages: BeamPages, max_model_len: int) -> None:
        assert sequence.audio is not None
        assert sequence.audio.search is not None
        assert sequence.params.max_tokens is not None
        prompt = sequence.prompt_token_ids
        room = max_model_len - len(prompt)
        self._beams = SpeechBeams(
            sequence.audio.search, sequence.stop_token_ids, min(room, sequence.params.max_tokens)
        )
        self._sequence = sequence
        self._params = attrs.evolve(sequence.params, logprobs=2 * sequence.audio.search.beam_width)
        self._pages = pages
        self._tables = [pages.take(-(-len(prompt) // pages.page_size))]
        self._failure: str | None = None

    @property
    def has_ended(self) -> bool:
        return self._failure is not None or not self._beams.live

    def lags(self, sequence: ScheduledSequence) -> bool:
        """It is not as far as it is to be after this step."""
        return not self.has_ended and self._beams.length <= len(sequence.output_token_ids)

    def sequences(self) -> list[ScheduledSequence]:
        """What is to be computed for its next token."""
        prompt = self._sequence.prompt_token_ids
        is_first = self._beams.length == 0
        return [
            attrs.evolve(
                self._sequence,
                request_id=-1,  # nothing is remembered of it from step to step
                start=0 if is_first else len(prompt) + self._beams.length - 1,
                token_ids=prompt if is_first else [beam.token_ids[-1]],
                block_tables=[table],
                params=self._params,
                output_token_ids=beam.token_ids,
            )
            for beam, table in zip(self._beams.live, self._tables, strict=True)
        ]

    def advance(self, outputs: Sequence[SequenceOutput]) -> list[PageCopy]:
        """outputs: of `sequences`. Returns what is to be copied before the next step."""
        self._failure = next((output.failure for output in outputs if output.failure is not None), None)
        if self._failure is not None:
            return []
        rows = [output.tokens[0].logprobs for output in outputs]
        num_computed = len(self._sequence.prompt_token_ids) + self._beams.length
        self._beams.advance([row for row in rows if row is not None])
        parents = [beam.parent for beam in self._beams.live]
        self._tables, copies = self._pages.fork(self._tables, parents, num_computed)
        return copies

    def output(self) -> SequenceOutput:
        if self._failure is not None:
            return SequenceOutput(failure=self._failure)
        if self._beams.live:
            return SequenceOutput([SampledToken(self._beams.live[0].token_ids[-1])], is_provisional=True)
        return SequenceOutput(self._beams.best().tokens(), is_whole=True)

    def end(self) -> None:
        self._pages.give_back({page for table in self._tables for page in table})
        self._tables = []


class SpeechSearches:
    """The searches of a model's steps.

    Args:
      compute: a step of ordinary sequences.
    """

    def __init__(
        self,
        executor: BeamExecutor,
        compute: Callable[[StepBatch], list[SequenceOutput]],
        max_model_len: int,
    ) -> None:
        self._executor = executor
        self._compute = compute
        self._max_model_len = max_model_len
        self._searches: dict[int, _Search] = {}

    def execute(self, batch: StepBatch) -> list[SequenceOutput]:
        """See `ModelRunner.execute`."""
        self._forget_others({sequence.request_id for sequence in batch.sequences})
        others = [sequence for sequence in batch.sequences if not is_search(sequence)]
        # A part of a prompt is left until the whole is wanted.
        seeking = [one for one in batch.sequences if is_search(one) and one.samples]
        found = iter(self._advance(others, seeking))
        return [
            self._output(sequence) if is_search(sequence) else next(found) for sequence in batch.sequences
        ]

    def forget_all(self) -> None:
        """The KV cache is freed. Its pages with it."""
        self._searches.clear()

    def _forget_others(self, request_ids: set[int]) -> None:
        for request_id in self._searches.keys() - request_ids:
            self._searches.pop(request_id).end()

    def _advance(
        self, others: Sequence[ScheduledSequence], seeking: Sequence[ScheduledSequence]
    ) -> list[SequenceOutput]:
        """Bring all searches to where they have to be; returns what the step gives for the others."""
        for sequence in seeking:
            if sequence.request_id not in self._searches:
                search = _Search(sequence, self._executor.beam_pages, self._max_model_len)
                self._searches[sequence.request_id] = search
        given: list[SequenceOutput] | None = None
        while (lagging := self._lagging(seeking)) or given is None:
            outputs = self._compute_beams([] if given is not None else others, lagging)
            given = outputs if given is None else given
        return given

    def _lagging(self, seeking: Sequence[ScheduledSequence]) -> list[_Search]:
        pairs = ((self._searches[sequence.request_id], sequence) for sequence in seeking)
        return [search for search, sequence in pairs if search.lags(sequence)]

    def _compute_beams(
        self, others: Sequence[ScheduledSequence], searches: Sequence[_Search]
    ) -> list[SequenceOutput]:
        """One token of each search, beside the others, whose outputs are returned."""
        beams = [search.sequences() for search in searches]
        sequences = [*others, *(sequence for own in beams for sequence in own)]
        outputs = self._compute(StepBatch(sequences)) if sequences else []
        copies: list[PageCopy] = []
        first = len(others)
        for search, own in zip(searches, beams, strict=True):
            copies += search.advance(outputs[first : first + len(own)])
            first += len(own)
        self._executor.copy_pages(copies)
        return outputs[: len(others)]

    def _output(self, sequence: ScheduledSequence) -> SequenceOutput:
        if not sequence.samples:
            return SequenceOutput()
        search = self._searches[sequence.request_id]
        if search.has_ended:
            self._searches.pop(sequence.request_id).end()
        return search.output()
