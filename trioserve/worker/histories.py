"""What the sampler remembers of a request from step to step, so that a step costs its new tokens only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from trioserve.worker.bad_words import BadWords
from trioserve.worker.penalties import TokenCounts
from trioserve.worker.thinking import ThinkingWatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.worker.batch import ScheduledSequence

__all__ = ["Histories", "History"]


@attrs.define(eq=False)
class History:
    """Derived from one sequence's prompt and output, and from nothing else: it can be made anew at any time.

    Each part is None where the request has no use for it.
    """

    allowed: np.ndarray | None = None
    """bool [vocab]: `allowed_token_ids`."""
    bad_words: BadWords | None = None
    counts: TokenCounts | None = None
    thinking: ThinkingWatch | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    """How many of each have been taken in."""

    @classmethod
    def before_output(cls, sequence: ScheduledSequence, vocab_size: int) -> History:
        history = cls(
            allowed=_mask_of(sequence.params.allowed_token_ids, vocab_size),
            num_prompt_tokens=len(sequence.prompt_token_ids),
        )
        if sequence.constraints.bad_words:
            history.bad_words = BadWords(sequence.constraints.bad_words, vocab_size)
        if sequence.params.needs_penalties:
            # Only the repetition penalty looks at the prompt.
            looks_at_prompt = sequence.params.repetition_penalty != 1
            history.counts = TokenCounts(sequence.prompt_token_ids if looks_at_prompt else ())
        if sequence.constraints.thinking is not None:
            history.thinking = ThinkingWatch(sequence.constraints.thinking)
            history.thinking.extend(sequence.prompt_token_ids)
        return history

    def is_past_of(self, sequence: ScheduledSequence) -> bool:
        """False if the request was given another prompt, or lost output."""
        return self.num_prompt_tokens == len(sequence.prompt_token_ids) and self.num_output_tokens <= len(
            sequence.output_token_ids
        )

    def extend(self, output_token_ids: Sequence[int]) -> None:
        """Take in what came since the last time. output_token_ids: all of them."""
        new = output_token_ids[self.num_output_tokens :]
        if self.counts is not None:
            self.counts.extend(new)
        if self.thinking is not None:
            self.thinking.extend(new)
        self.num_output_tokens += len(new)


_NOTHING = History()
"""Of all requests that need none. Never extended."""


def _mask_of(allowed: tuple[int, ...] | None, vocab_size: int) -> np.ndarray | None:
    """None also if none of them exists: a constraint that leaves nothing does not count."""
    inside = [token for token in allowed or () if token < vocab_size]
    if not inside:
        return None
    mask = np.zeros(vocab_size, bool)
    mask[inside] = True
    return mask


class Histories:
    """By request. Bound: the sequences of one step.

    A request that is not in a step is forgotten. A preempted one pays for its whole history once more when it
    comes back, as it does for its KV cache.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._known: dict[int, History] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, sequences: Sequence[ScheduledSequence]) -> list[History]:
        """Of each sequence, up to date; all others are forgotten."""
        found = [self._up_to_date(s) if _needs_history(s) else _NOTHING for s in sequences]
        pairs = zip(sequences, found, strict=True)
        self._known = {s.request_id: history for s, history in pairs if history is not _NOTHING}
        return found

    def _up_to_date(self, sequence: ScheduledSequence) -> History:
        history = self._known.get(sequence.request_id)
        if history is None or not history.is_past_of(sequence):
            history = History.before_output(sequence, self._vocab_size)
        history.extend(sequence.output_token_ids)
        return history


def _needs_history(sequence: ScheduledSequence) -> bool:
    constraints = sequence.constraints
    return bool(
        sequence.params.needs_penalties
        or constraints.bad_words
        or constraints.thinking is not None
        or sequence.params.allowed_token_ids is not None
    )
