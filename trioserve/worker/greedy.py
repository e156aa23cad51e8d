"""The shortest way to a token: of sequences for which only the highest logit matters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.worker.batch import SampledToken, SequenceOutput
from trioserve.worker.rows import accepted, drafts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.worker.batch import ScheduledSequence
    from trioserve.worker.executor import Highest

__all__ = ["NOT_FINITE", "is_plain_greedy", "take_highest"]

NOT_FINITE = "The model's logits are no finite numbers."


def is_plain_greedy(sequence: ScheduledSequence) -> bool:
    """Does only the highest logit matter, if no custom processor changes it?"""
    params, constraints = sequence.params, sequence.constraints
    return (
        params.is_greedy
        and sequence.grammar is None
        and not params.reports_logprobs
        and not params.logit_bias
        and params.allowed_token_ids is None
        and len(sequence.output_token_ids) >= params.min_tokens
        and not params.needs_penalties
        and not constraints.bad_words
        and constraints.thinking is None
    )


def take_highest(highest: Highest, sequences: Sequence[ScheduledSequence]) -> list[SequenceOutput]:
    """The next tokens of each sequence. highest: 1 + num_drafts rows per sequence."""
    outputs = []
    first = 0
    for sequence in sequences:
        end = first + 1 + sequence.num_drafts
        tokens = accepted(highest.token_ids[first:end], drafts_of(sequence))
        if all(highest.is_finite[first : first + len(tokens)]):
            outputs.append(SequenceOutput([SampledToken(token) for token in tokens]))
        else:
            outputs.append(SequenceOutput(failure=NOT_FINITE))
        first = end
    return outputs
