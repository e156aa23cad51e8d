"""What the sampler's tests share: references in float64 numpy, a fake grammar, a look at shaped logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from helpers_worker import scheduled_sequence
from trioserve.worker.masks import GrammarMasks
from trioserve.worker.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from trioserve.sampling_params import SamplingParams
    from trioserve.worker.batch import ScheduledSequence, SequenceOutput

Array = np.ndarray


def random_logits(rows: int, vocab_size: int, *, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def filtered(logits: Array, params: SamplingParams) -> Array:
    """Temperature and every filter by its definition, over the whole vocabulary."""
    p = softmax(logits.astype(np.float64) / params.temperature)
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    mass_before = np.concatenate(([0], p[order].cumsum()[:-1]))
    p[order[mass_before >= params.top_p]] = 0
    return p / p.sum()


def follows(drawn: Sequence[int] | Array, expected: Array, num_groups: int = 16) -> bool:
    """Pearson's chi-square test: False for draws from `expected` fewer than once in a million times.

    Tokens are grouped by id, as thousands of draws are few for thousands of tokens. The statistic's tail is
    Wilson and Hilferty's: its cube root is nearly normal, and beyond 5 lie 3e-7 of a normal distribution.
    """
    drawn = np.asarray(drawn)
    if (expected[drawn] == 0).any():
        return False
    masses = np.bincount(np.arange(len(expected)) % num_groups, expected, num_groups) * len(drawn)
    counts = np.bincount(drawn % num_groups, minlength=num_groups)
    likely = masses > 0
    freedom = likely.sum() - 1
    if freedom == 0:
        return True
    statistic = ((counts - masses)[likely] ** 2 / masses[likely]).sum()
    spread = 2 / (9 * freedom)
    return bool(((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread) < 5)


def sample(
    logits: torch.Tensor, sequences: Sequence[ScheduledSequence], sampler: Sampler | None = None
) -> list[SequenceOutput]:
    """One step of a new sampler, or of one that has a past; the logits stay as they are."""
    masks = GrammarMasks(logits.shape[1])
    try:
        filled = masks.begin(sequences)()
    finally:
        masks.close()
    return (sampler or Sampler(logits.shape[1])).sample(logits.float().clone().numpy(), sequences, filled)


def drawn(output: SequenceOutput) -> list[int]:
    return [token.token_id for token in output.tokens]


def greedy_choice(logits: list[float], **fields: Any) -> list[int]:
    """The tokens that a sequence gets; `logits` are the same at each of its rows."""
    sequence = scheduled_sequence(**fields)
    [output] = sample(torch.tensor([logits]).repeat(1 + sequence.num_drafts, 1), [sequence])
    return drawn(output)


class Recorder:
    """A custom logits processor that changes nothing and remembers what it saw."""

    seen: torch.Tensor

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return False

    def apply(self, logits: torch.Tensor, rows: Sequence[object]) -> torch.Tensor:
        self.seen = logits.clone()
        return logits


class ShapedLogits:
    """A sampler that one can look into: the logits after masks, bars, biases and penalties."""

    def __init__(self, vocab_size: int) -> None:
        self._recorder = Recorder()
        self._sampler = Sampler(vocab_size, [self._recorder])

    def __call__(self, logits: torch.Tensor, sequences: Sequence[ScheduledSequence]) -> Array:
        """As a custom processor sees them, fp64 [R, vocab]."""
        sample(logits, sequences, self._sampler)
        return self._recorder.seen.double().numpy()


class FakeGrammar:
    """At its i-th token it allows those of `steps[i]`, and after the last step those of `end`."""

    def __init__(
        self, steps: Sequence[set[int]], *, fails_after: int | None = None, end: Collection[int] = ()
    ) -> None:
        self.taken: list[int] = []
        self.failure: str | None = None
        self._steps = steps
        self._fails_after = fails_after
        self._end = end

    @property
    def is_complete(self) -> bool:
        return len(self.taken) == len(self._steps)

    def fill_mask(self, mask: Array) -> None:
        mask[:] = 0
        allowed = self._steps[len(self.taken)] if not self.is_complete else self._end
        for token in allowed:
            mask.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))

    def advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self.is_complete or token not in self._steps[len(self.taken)]:
                self.failure = f"{token} does not fit"
            elif len(self.taken) == self._fails_after:
                self.failure = "too much work"
            if self.failure is not None:
                return
            self.taken.append(token)

    def roll_back(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]

    def count_fitting(self, token_ids: Sequence[int]) -> int:
        raise NotImplementedError

    def forced_tokens(self, limit: int) -> list[int]:
        raise NotImplementedError
