"""From requests' shares of a step to what the runner gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from trioserve.core.kv_cache import KVCacheManager
from trioserve.core.proposer import Proposer
from trioserve.core.request import Request, Share
from trioserve.worker.batch import ScheduledSequence, StepBatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trioserve.core.stats import StepCounters

__all__ = ["Launcher", "StepPlan", "launch_sequence"]

_MAX_DRAFTS = 256
"""Of all sequences of a step: each takes a row of logits, which is 1 MB for a vocabulary of 262,144."""


@attrs.frozen(eq=False)
class StepPlan:
    """One step: what the runner gets, and whose it is. `requests[i]` is that of `batch.sequences[i]`."""

    requests: Sequence[Request]
    batch: StepBatch


@attrs.frozen(eq=False)
class Launcher:
    """Makes a step of what was decided, and brings in drafts as far as it goes."""

    _max_num_tokens: int
    """Of a step."""
    _kv_cache: KVCacheManager
    _proposer: Proposer

    def launch(self, shares: Mapping[Request, int], counters: StepCounters) -> StepPlan:
        """Each request with its number of tokens, for which it has blocks. Sets their `share`."""
        num_spare = min(_MAX_DRAFTS, self._max_num_tokens - sum(shares.values()))
        sequences = []
        for request, num_tokens in shares.items():
            start = request.num_computed_tokens
            samples = start + num_tokens == request.num_known_tokens
            drafts = self._draft(request, num_spare, counters) if samples and num_spare else []
            num_spare -= len(drafts)
            request.share = Share(start, num_tokens + len(drafts), len(drafts), samples)
            sequences.append(launch_sequence(request, request.share, drafts))
        return StepPlan(list(shares), StepBatch(sequences))

    def _draft(self, request: Request, limit: int, counters: StepCounters) -> list[int]:
        """Guesses for the tokens that come; with n of them, the step can give n + 1 tokens."""
        limit = min(limit, request.max_known_tokens - request.num_known_tokens - 1)
        drafts = self._proposer.propose(request, limit) if limit > 0 else []
        if not drafts or not self._kv_cache.extend(request, request.num_known_tokens + len(drafts)):
            return []
        counters.num_drafts += 1
        counters.num_draft_tokens += len(drafts)
        return drafts


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
        audio=request.audio,
    )
