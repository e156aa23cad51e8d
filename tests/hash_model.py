"""A model that is a hash function, a grammar for it, and what both give without any engine."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import attrs

from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy as np

    from trioserve.core.request import CoreRequest
    from trioserve.sampling_params import RepetitionDetection

__all__ = ["EOS", "VOCAB_SIZE", "GrammarForm", "HashGrammar", "generate_alone", "next_token"]

VOCAB_SIZE = 40
EOS = 0


def next_token(history: Sequence[int], seed: int, barred: Collection[int] = ()) -> int:
    """The whole model: depends on every token before, and on the seed."""
    digest = hashlib.sha256(repr((list(history), seed)).encode()).digest()
    token = int.from_bytes(digest[:4], "big") % VOCAB_SIZE
    while token in barred:
        token = (token + 1) % VOCAB_SIZE
    return token


@attrs.frozen
class GrammarForm:
    tokens: tuple[int | None, ...]
    """What the whole match consists of: this token, or any but EOS. An EOS ends it."""
    may_end: frozenset[int] = frozenset()
    """EOS may come as well after so many tokens."""
    fails_after: int | None = None
    """Tokens: the next one is too much."""

    def barred(self, num_taken: int) -> frozenset[int]:
        """Where the match is not complete."""
        forced = self.tokens[num_taken]
        allowed = set(range(1, VOCAB_SIZE)) if forced is None else {forced}
        return frozenset(range(VOCAB_SIZE)) - allowed - ({EOS} if num_taken in self.may_end else set())


class HashGrammar:
    """A `trioserve.worker.grammar.GrammarMatcher`, but for masks, which nobody here needs."""

    def __init__(self, form: GrammarForm) -> None:
        self.failure: str | None = None
        self.taken: list[int] = []
        self._form = form

    @property
    def is_complete(self) -> bool:
        return self.failure is None and _completes(self.taken, self._form)

    def fill_mask(self, mask: np.ndarray) -> None:
        raise NotImplementedError

    def barred(self) -> frozenset[int]:
        if self.is_complete:
            return frozenset(range(1, VOCAB_SIZE))
        return self._form.barred(len(self.taken))

    def advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if token in self.barred():
                self.failure = f"{token} does not fit"
            elif len(self.taken) == self._form.fails_after:
                self.failure = "too much work"
            if self.failure is not None:
                return
            self.taken.append(token)

    def roll_back(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]

    def count_fitting(self, token_ids: Sequence[int]) -> int:
        taken = HashGrammar(attrs.evolve(self._form, fails_after=None))
        taken.taken = self.taken.copy()
        for count, token in enumerate(token_ids):
            if token in taken.barred():
                return count
            taken.advance([token])
        return len(token_ids)

    def forced_tokens(self, limit: int) -> list[int]:
        forced: list[int] = []
        for place in range(len(self.taken), len(self._form.tokens)):
            token = self._form.tokens[place]
            if token is None or place in self._form.may_end or len(forced) == limit:
                break
            forced.append(token)
        return forced


def _completes(output: Sequence[int], form: GrammarForm) -> bool:
    return len(output) == len(form.tokens) or (len(output) > 0 and output[-1] == EOS)


def generate_alone(
    request: CoreRequest, form: GrammarForm | None, max_model_len: int
) -> tuple[list[int], FinishReason, int | str | None]:
    """What a request must give: tokens, finish reason, and what stopped it: a stop token or "grammar". Where
    its grammar fails, how many of the tokens are told is another matter."""
    params = request.params
    eos = set() if params.ignore_eos else {EOS}
    stops = eos | set(params.stop_token_ids)
    history = list(request.prompt_token_ids)
    output: list[int] = []
    while True:
        barred = form.barred(len(output)) if form is not None else frozenset()
        barred_too = barred | stops if len(output) < params.min_tokens else barred
        token = next_token(history, request.seed, barred_too if len(barred_too) < VOCAB_SIZE else barred)
        if form is not None and form.fails_after == len(output):
            return output, FinishReason.ERROR, None
        history.append(token)
        output.append(token)
        if token in stops and len(output) >= params.min_tokens:
            return output, FinishReason.STOP, None if token in eos else token
        if form is not None and _completes(output, form):
            return output, FinishReason.STOP, "grammar"
        if len(output) == params.max_tokens or len(history) == max_model_len:
            return output, FinishReason.LENGTH, None
        if params.repetition_detection is not None and _repeats(output, params.repetition_detection):
            return output, FinishReason.REPETITION, None


def _repeats(output: list[int], detection: RepetitionDetection) -> bool:
    sizes = range(detection.min_pattern_size, detection.max_pattern_size + 1)
    count = detection.min_count
    return any(output[-size * count :] == output[-size:] * count for size in sizes)
