"""Beam search: the most likely continuations of a prompt, as far as a search of limited width finds them.

After each token, all continuations of all live beams are ranked by the sum of their logprobs. Of the best
`beam_width`, those that end with EOS are finished; the best `beam_width` of the others live on. At most
`beam_width` of the best 2 * beam_width continuations can end, so these suffice, and no beam can have more
than that many among them: each beam needs its 2 * beam_width most likely tokens and no more.

A finished sequence's score is its logprobs' sum / length ** length_penalty, where the length is that of the
generated tokens, EOS included (Wu et al., https://arxiv.org/abs/1609.08144, section 7, in the simpler form
that transformers uses; there, these results are those of `generate(num_beams=..., early_stopping="never")`).
The search stops as soon as no live beam can reach the worst of the `beam_width` best finished ones. A sum of
logprobs only falls, so what a beam can reach at most is its present sum, over max_tokens ** length_penalty
(its next length for a negative penalty): stopping then changes no result.

vLLM differs: it takes every EOS among a beam's own candidates, however many continuations rank before it,
counts the prompt in the length and EOS not, never stops early, and ignores the temperature.
"""

from __future__ import annotations

import math
from array import array
from heapq import nlargest
from operator import attrgetter
from typing import TYPE_CHECKING

import attrs

from trioserve.outputs import FinishReason
from trioserve.worker.batch import LogprobRow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trioserve.beam_search_params import BeamSearchParams

__all__ = ["Beam", "BeamSearch"]

_HIGHEST_EXPONENT = 600.0
"""exp() of it is still a float, with room for a sum of logprobs."""


@attrs.frozen(eq=False)
class Beam:
    """A sequence of tokens after the prompt."""

    token_ids: bytes
    """The prompt's and the generated ones, int32."""
    cum_logprob: float
    length: int
    """Of the generated ones."""
    score: float
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The EOS that ended it, the last one of `token_ids`."""
    _before: Beam | None = None
    _row: LogprobRow | None = None
    """The last token's logprobs: its own, then those of the tokens it was chosen from."""

    def logprob_rows(self) -> list[LogprobRow]:
        """One per generated token."""
        rows: list[LogprobRow] = []
        beam: Beam | None = self
        while beam is not None and beam._row is not None:
            rows.append(beam._row)
            beam = beam._before
        return rows[::-1]


@attrs.frozen(eq=False)
class _Candidate:
    cum_logprob: float
    beam: Beam
    row: LogprobRow
    position: int
    """Of its token in the row."""

    @property
    def token_id(self) -> int:
        return self.row.token_ids[self.position]


class BeamSearch:
    """The search itself, without an engine: it is given logprobs, and says of which beams it wants them.

    while not search.is_done:
        rows = ...                   # the next token's logprobs after each of search.live
        search.advance(rows)
    search.finished                  # the results
    """

    def __init__(
        self, prompt_token_ids: Sequence[int], params: BeamSearchParams, eos_token_ids: Sequence[int]
    ) -> None:
        self._params = params
        self._width = params.beam_width
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._length = 0
        self.live = [Beam(array("i", prompt_token_ids).tobytes(), 0.0, 0, 0.0)]
        """Of equal length, the most likely one first."""
        self.finished: list[Beam] = []
        """The best so far, the best first; at most beam_width."""

    @property
    def is_done(self) -> bool:
        return not self.live

    def advance(self, rows: Sequence[LogprobRow]) -> None:
        """Take in the logprobs of each live beam's next token: first any token, which is ignored, then the
        most likely ones in falling order (2 * beam_width, or the whole vocabulary, which a temperature that
        is neither 0 nor 1 needs)."""
        self._length += 1
        candidates = (
            candidate
            for beam, row in zip(self.live, rows, strict=True)
            for candidate in self._candidates(beam, row)
        )
        self.live = self._select(nlargest(2 * self._width, candidates, key=attrgetter("cum_logprob")))
        if self._is_settled():
            self.live = []

    def end(self, reason: FinishReason) -> None:
        """Go no further: the live beams are finished as they are."""
        for beam in self.live:
            self._keep(attrs.evolve(beam, score=self._score(beam.cum_logprob), finish_reason=reason))
        self.live = []

    def _candidates(self, beam: Beam, row: LogprobRow) -> Iterator[_Candidate]:
        temperature = self._params.temperature or 1.0
        offset = beam.cum_logprob
        if temperature != 1.0:
            offset -= _log_sum_exp(row.logprobs[1:], temperature)
        for position in range(1, min(2 * self._width + 1, len(row.token_ids))):
            cum_logprob = offset + row.logprobs[position] / temperature
            if cum_logprob > -math.inf:
                yield _Candidate(cum_logprob, beam, row, position)

    def _select(self, candidates: Sequence[_Candidate]) -> list[Beam]:
        """Keep those that end; returns those that live on."""
        is_last = self._length == self._params.max_tokens
        live: list[Beam] = []
        for place, candidate in enumerate(candidates):
            token_id = candidate.token_id
            if token_id in self._eos or is_last:
                if place < self._width:
                    reason = FinishReason.STOP if token_id in self._eos else FinishReason.LENGTH
                    self._keep(self._extend(candidate, reason))
            elif len(live) < self._width:
                live.append(self._extend(candidate))
        return live

    def _extend(self, candidate: _Candidate, reason: FinishReason | None = None) -> Beam:
        token_id, row = candidate.token_id, candidate.row
        chosen_from = slice(1, 2 * self._width + 1)
        own = candidate.position
        return Beam(
            candidate.beam.token_ids + array("i", [token_id]).tobytes(),
            candidate.cum_logprob,
            self._length,
            self._score(candidate.cum_logprob),
            reason,
            token_id if reason is FinishReason.STOP else None,
            candidate.beam,
            LogprobRow(
                [token_id, *row.token_ids[chosen_from]],
                [row.logprobs[own], *row.logprobs[chosen_from]],
                [row.ranks[own], *row.ranks[chosen_from]],
            ),
        )

    def _keep(self, beam: Beam) -> None:
        self.finished = sorted([*self.finished, beam], key=attrgetter("score"), reverse=True)[: self._width]

    def _is_settled(self) -> bool:
        if len(self.finished) < self._width or not self.live:
            return False
        if self._width == 1:
            return True  # one beam, and it has ended: that is greedy decoding
        penalty = self._params.length_penalty
        length = self._params.max_tokens if penalty > 0 else self._length + 1
        return self.finished[-1].score >= _penalized(self.live[0].cum_logprob, length, penalty)

    def _score(self, cum_logprob: float) -> float:
        return _penalized(cum_logprob, self._length, self._params.length_penalty)


def _penalized(cum_logprob: float, length: int, penalty: float) -> float:
    """cum_logprob / length ** penalty, for any finite penalty."""
    return cum_logprob * math.exp(min(-penalty * math.log(max(length, 1)), _HIGHEST_EXPONENT))


def _log_sum_exp(logprobs: Sequence[float], temperature: float) -> float:
    """log(sum(exp(logprobs / temperature))): what brings a distribution at this temperature to 1."""
    import numpy as np  # noqa: PLC0415 - a tenth of a second, and 20 MB, that few servers need

    scaled = np.asarray(logprobs, dtype=np.float64) / temperature
    highest = scaled.max()
    return float(highest + np.log(np.exp(scaled - highest).sum()))
