"""From the logits of a step to its tokens, all rows at once, each by its own parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from trioserve.worker.batch import SampledToken
from trioserve.worker.biases import apply_biases, must_not_stop
from trioserve.worker.filters import draw_tokens
from trioserve.worker.logprobs import RawLogprobs
from trioserve.worker.penalties import apply_penalties

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.worker.batch import ScheduledSequence

__all__ = ["sample", "uniform"]


def sample(logits: torch.Tensor, sequences: Sequence[ScheduledSequence]) -> list[SampledToken]:
    """The next token of each sequence.

    The order: raw logprobs are taken; min_tokens, logit_bias and penalties change the logits; greedy rows
    take the highest, the others go through temperature, min_p, top_k, top_p and a draw. A row's token
    depends on its own logits, parameters, seed and position only.

    logits: [R, vocab], one row per sequence, fp32 or bf16; fp32 ones are overwritten.
    """
    logits = logits.float()
    if all(_is_plain_greedy(sequence) for sequence in sequences):
        return [SampledToken(token_id) for token_id in logits.argmax(-1).tolist()]
    logprobs = RawLogprobs.capture(logits, sequences)
    apply_biases(logits, sequences)
    apply_penalties(logits, sequences)
    token_ids = _choose(logits, sequences)
    reported = logprobs.report(token_ids) if logprobs is not None else {}
    return [reported.get(row) or SampledToken(token_id) for row, token_id in enumerate(token_ids)]


def _is_plain_greedy(sequence: ScheduledSequence) -> bool:
    params = sequence.params
    reads_only = params.logprobs is None and not params.logit_bias
    return params.is_greedy and reads_only and not params.needs_penalties and not must_not_stop(sequence)


def _choose(logits: torch.Tensor, sequences: Sequence[ScheduledSequence]) -> list[int]:
    greedy = [row for row, s in enumerate(sequences) if s.params.is_greedy]
    random = [row for row, s in enumerate(sequences) if not s.params.is_greedy]
    chosen = torch.empty(len(sequences), dtype=torch.int64)
    if greedy:
        chosen[greedy] = logits[greedy].argmax(-1)
    if random:
        drawing = [sequences[row] for row in random]
        uniforms = torch.tensor(
            [uniform(s.seed, len(s.output_token_ids)) for s in drawing], dtype=torch.float64
        )
        chosen[random] = draw_tokens(logits[random], [s.params for s in drawing], uniforms)
    token_ids: list[int] = chosen.tolist()
    return token_ids


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) only: Philox, keyed by one, counting by the other.

    A counter-based generator has no state that a preempted or restarted sequence could lose. 52 bits, so
    that the product with a sum of weights always stays below the sum.
    """
    bits = np.random.Philox(key=seed % 2**64, counter=position).random_raw()
    return float(bits >> 12) / 2**52
