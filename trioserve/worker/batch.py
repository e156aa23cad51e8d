"""What the scheduler hands to the model runner for one step, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.audio_input import AudioInput
from trioserve.sampling_params import SamplingParams
from trioserve.token_constraints import TokenConstraints
from trioserve.worker.grammar import GrammarMatcher

__all__ = ["LogprobRow", "SampledToken", "ScheduledSequence", "SequenceOutput", "StepBatch"]


@attrs.define(kw_only=True, eq=False)  # not frozen: one is made per sequence and step, at half the cost
class ScheduledSequence:
    """One sequence's share of a step; not to be changed once made.

    Positions, as half-open intervals:

        [0, start)                      in the KV cache already
        [start, start + len(token_ids)) computed in this step, written to the cache

    The last `num_drafts` of `token_ids` are guesses at what the model will say. They are computed like all
    others, and each of them is kept if the model draws it in its place; from the first that it does not draw,
    their places in the cache will be overwritten.

    The sequences it refers to belong to the scheduler. While the step runs they may grow at their ends
    (block tables), and do not change otherwise.
    """

    request_id: int
    start: int
    token_ids: Sequence[int]
    num_drafts: int = 0
    """Only where `samples`."""
    block_tables: Sequence[Sequence[int]]
    """One per group of layers (`trioserve.worker.kv_layout`). `block_tables[group][p // block_size]` holds
    position p, for every p that the group's layers look at or write to in this step."""
    samples: bool
    """True if this step reaches the sequence's last known token, so that the next one is drawn."""
    params: SamplingParams
    constraints: TokenConstraints
    seed: int
    """Of this sequence; a draw depends on (seed, number of output tokens before it) only."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Generated so far, without drafts; with the prompt, what penalties look at."""
    stop_token_ids: frozenset[int]
    """EOS (unless ignored) and the request's own: barred until min_tokens are there."""
    prompt_logprobs_start: int
    """The first prompt position whose logprobs are still wanted; len(prompt_token_ids) if none are. The step
    gives those of the positions q with q - 1 in [start, start + len(token_ids))."""
    grammar: GrammarMatcher | None = None
    """What the output must match; it has taken in `output_token_ids`, and all drafts fit. Whoever samples
    advances it by the tokens that are drawn."""
    lora: str | None = None
    """The key of its adapter."""
    audio: AudioInput | None = None
    """What a speech model hears."""


@attrs.frozen(eq=False)
class StepBatch:
    """All sequences of one step; never empty."""

    sequences: Sequence[ScheduledSequence]


@attrs.frozen(eq=False)
class LogprobRow:
    """Log probabilities of one position, as the model gave them, before any sampling parameter acted.

    First the token that is there (sampled, or of the prompt), then the most likely ones in falling order,
    then those that `logprob_token_ids` names. A token may occur twice.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    ranks: Sequence[int]
    """1 + the number of tokens that are strictly more likely."""


@attrs.frozen(eq=False)
class SampledToken:
    token_id: int
    logprobs: LogprobRow | None = None
    """None unless they were asked for."""


@attrs.frozen(eq=False)
class SequenceOutput:
    """What a step gave for one sequence."""

    tokens: Sequence[SampledToken] = ()
    """Empty if it does not sample; else the drafts that were kept, and one more."""
    prompt_logprobs: Sequence[LogprobRow] = ()
    """Of consecutive prompt positions from `prompt_logprobs_start` on."""
    failure: str | None = None
    """Why this sequence cannot go on (its grammar ran into a limit, say); there are no tokens then."""
    is_provisional: bool = False
    """Of a search: it has come so far, and all of its tokens may still change. There is one."""
    is_whole: bool = False
    """Of a search that has ended: its tokens are all of the output, in the place of provisional ones."""
