"""What the scheduler hands to the model runner for one step, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.sampling_params import SamplingParams

__all__ = ["SampledToken", "ScheduledSequence", "StepBatch"]


@attrs.define(kw_only=True, eq=False)  # not frozen: one is made per sequence and step, at half the cost
class ScheduledSequence:
    """One sequence's share of a step; not to be changed once made.

    Positions, as half-open intervals:

        [0, start)                      in the KV cache already
        [start, start + len(token_ids)) computed in this step, written to the cache

    `block_table[p // block_size]` is the block that holds position p, for every p of both intervals.
    The sequences it refers to belong to the scheduler and do not change while the step runs.
    """

    request_id: int
    start: int
    token_ids: Sequence[int]
    block_table: Sequence[int]
    samples: bool
    """True if this step reaches the sequence's last known token, so that the next one is drawn."""
    params: SamplingParams
    seed: int
    """Of this sequence; a draw depends on (seed, position) only."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Generated so far; with the prompt, what penalties look at, and its length what min_tokens does."""
    stop_token_ids: frozenset[int]
    """EOS (unless ignored) and the request's own: barred until min_tokens are there."""


@attrs.frozen(eq=False)
class StepBatch:
    """All sequences of one step; never empty."""

    sequences: Sequence[ScheduledSequence]


@attrs.frozen(eq=False)
class SampledToken:
    """The next token of one sequence.

    The three sequences are empty unless logprobs were asked for. Then they hold 1 + k entries: the sampled
    token first, then the k = `params.logprobs` most likely ones in falling order.
    """

    token_id: int
    logprob_token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    ranks: Sequence[int] = ()
    """1-based, by falling probability."""
