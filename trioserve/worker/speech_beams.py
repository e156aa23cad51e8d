"""One beam search for the text of some audio, without what computes it.

It is that of OpenAI's Whisper and of transformers: after each token, all continuations of all live beams are
ranked by the sum of their logprobs, as the rules for speech leave them. Of the best `beam_width`, those that
end are finished, and the best `beam_width` of the others live on. It ends once as many have finished: what
goes on is rarely better then, and a text of 448 tokens would be long to wait for. (The search over text,
`trioserve.frontend.beam_search`, goes on until nothing better can come; there, a round costs a message.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import nlargest
from operator import attrgetter
from typing import TYPE_CHECKING

import attrs

from trioserve.worker.batch import LogprobRow, SampledToken

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from trioserve.audio_input import SpeechSearch

__all__ = ["SpeechBeam", "SpeechBeams"]


@attrs.frozen(eq=False)
class SpeechBeam:
    """What may have been said."""

    token_ids: Sequence[int]
    cum_logprob: float
    parent: int
    """Which of the live beams before it, it goes on from."""
    _last: SampledToken | None = None
    _before: SpeechBeam | None = None

    def tokens(self) -> list[SampledToken]:
        found: list[SampledToken] = []
        beam: SpeechBeam | None = self
        while beam is not None and beam._last is not None:
            found.append(beam._last)
            beam = beam._before
        return found[::-1]


@attrs.frozen(eq=False)
class _Candidate:
    cum_logprob: float
    parent: int
    row: LogprobRow
    position: int
    """Of its token in the row."""

    @property
    def token_id(self) -> int:
        return self.row.token_ids[self.position]


class SpeechBeams:
    """
    Args:
      most_tokens: at least 1; a text of so many ends, if only for that.
    """

    def __init__(self, search: SpeechSearch, end_token_ids: Collection[int], most_tokens: int) -> None:
        self._search = search
        self._width = search.beam_width
        self._ends = end_token_ids
        self._most_tokens = most_tokens
        self._finished: list[SpeechBeam] = []
        self.live = [SpeechBeam((), 0.0, 0)]
        """The likeliest first; empty once the search has ended. Before its first token, one."""
        self.length = 0
        """Of the live ones, in tokens."""

    def advance(self, rows: Sequence[LogprobRow]) -> None:
        """Take in the logprobs of each live beam's next token: first any token, which is ignored, then the
        most likely ones in falling order, 2 * beam_width or all."""
        self.length += 1
        candidates = nlargest(2 * self._width, self._candidates(rows), key=attrgetter("cum_logprob"))
        before, self.live = self.live, []
        is_last = self.length == self._most_tokens
        for place, candidate in enumerate(candidates):
            ends = candidate.token_id in self._ends
            if is_last or ends:
                if place < self._width:
                    self._finished.append(_extend(before[candidate.parent], candidate))
            elif len(self.live) < self._width:
                self.live.append(_extend(before[candidate.parent], candidate))
        if len(self._finished) >= self._width:
            self.live = []

    def best(self) -> SpeechBeam:
        """Of a search that has ended."""
        return max(self._finished, key=self._score)

    def _score(self, beam: SpeechBeam) -> float:
        return float(beam.cum_logprob / len(beam.token_ids) ** self._search.length_penalty)

    def _candidates(self, rows: Sequence[LogprobRow]) -> Iterator[_Candidate]:
        for parent, (beam, row) in enumerate(zip(self.live, rows, strict=True)):
            for position in range(1, min(2 * self._width + 1, len(row.token_ids))):
                cum_logprob = beam.cum_logprob + row.logprobs[position]
                if cum_logprob > -math.inf:
                    yield _Candidate(cum_logprob, parent, row, position)


def _extend(beam: SpeechBeam, candidate: _Candidate) -> SpeechBeam:
    row, position = candidate.row, candidate.position
    token = row.token_ids[position]
    own = LogprobRow([token], [row.logprobs[position]], [row.ranks[position]])
    return SpeechBeam(
        [*beam.token_ids, token], candidate.cum_logprob, candidate.parent, SampledToken(token, own), beam
    )
