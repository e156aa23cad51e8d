"""From a request's share of a step to what the runner gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from trioserve.core.request import Request
from trioserve.worker.batch import ScheduledSequence, StepBatch

if TYPE_CHECKING:
    from trioserve.core.request import Share

__all__ = ["StepPlan", "launch_sequence"]


@attrs.frozen(eq=False)
class StepPlan:
    """One step: what the runner gets, and whose it is. `requests[i]` is that of `batch.sequences[i]`."""

    requests: Sequence[Request]
    batch: StepBatch


def launch_sequence(request: Request, share: Share, drafts: Sequence[int]) -> ScheduledSequence:
    """`drafts` are the last `share.num_drafts` tokens of the share."""
    known_end = share.start + share.num_tokens - share.num_drafts
    return ScheduledSequence(
        request_id=request.request_id,
        start=share.start,
        token_ids=[*request.tokens(share.start, known_end), *drafts],
        num_drafts=share.num_drafts,
        block_tables=request.block_tables,
        samples=share.samples,
        params=request.params,
        constraints=request.constraints,
        seed=request.seed,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        stop_token_ids=request.stop_token_ids,
        prompt_logprobs_start=request.prompt_logprobs_start,
        grammar=request.grammar,
        lora=request.lora,
    )
