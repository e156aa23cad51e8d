"""What a step's output changes in a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.core.request import RequestStatus
from trioserve.core.stop import find_stop
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from trioserve.core.request import Request, Share
    from trioserve.core.stats import StepCounters
    from trioserve.worker.batch import SampledToken, SequenceOutput

__all__ = ["take_in"]


def take_in(request: Request, output: SequenceOutput, counters: StepCounters) -> int:
    """The share of a request is back: record what is computed, and the new tokens, up to one that ends it.

    Returns how many tokens were kept: none for a request that ended while it was in flight.
    """
    assert request.share is not None
    share, request.share = request.share, None
    num_kept = 0
    if request.status is RequestStatus.RUNNING:
        num_kept = _keep_tokens(request, output)
        _keep_prompt_logprobs(request, output)
        _count(counters, share, output, num_kept)
    num_known = share.num_tokens - share.num_drafts
    # The last token that was kept has not been computed itself.
    num_computed_tokens = share.start + num_known + max(0, num_kept - 1)
    _count_prompt(counters, request, num_computed_tokens)
    request.num_computed_tokens = num_computed_tokens
    return num_kept


def _keep_tokens(request: Request, output: SequenceOutput) -> int:
    if output.failure is not None:
        _finish(request, FinishReason.ERROR)
        request.failure = output.failure
        return 0
    if output.is_provisional:
        request.output_token_ids += [token.token_id for token in output.tokens]
        return 0
    if output.is_whole:
        request.output_token_ids.clear()
    num_kept = 0
    for token in output.tokens:
        _keep(request, token)
        num_kept += 1
        if request.has_ended:
            break
    if 0 < num_kept == len(output.tokens):  # those are what the grammar has taken in
        _end_with_grammar(request)
    if request.drafter is not None and num_kept:
        request.drafter.extend(request.output_token_ids[-num_kept:])
    return num_kept


def _keep(request: Request, token: SampledToken) -> None:
    request.output_token_ids.append(token.token_id)
    request.unreported.append(token)
    stop = find_stop(request)
    if stop is not None:
        _finish(request, stop.reason)
        request.stop_token_id = stop.token_id


def _end_with_grammar(request: Request) -> None:
    """A whole match is a stop, like a stop token also where it comes with the last token allowed."""
    grammar = request.grammar
    if grammar is not None and grammar.is_complete and request.finish_reason is not FinishReason.STOP:
        _finish(request, FinishReason.STOP)
        request.has_completed_grammar = True


def _finish(request: Request, reason: FinishReason) -> None:
    request.status = RequestStatus.FINISHED
    request.finish_reason = reason


def _keep_prompt_logprobs(request: Request, output: SequenceOutput) -> None:
    """They go out together with the first token."""
    request.unreported_prompt_logprobs += output.prompt_logprobs
    request.prompt_logprobs_start += len(output.prompt_logprobs)


def _count(counters: StepCounters, share: Share, output: SequenceOutput, num_kept: int) -> None:
    counters.num_generation_tokens += num_kept
    if share.num_drafts:
        num_accepted = max(0, len(output.tokens) - 1)
        counters.num_accepted_tokens += num_accepted
        counts = counters.accepted_per_position
        counts += [0] * (num_accepted - len(counts))
        for position in range(num_accepted):
            counts[position] += 1


def _count_prompt(counters: StepCounters, request: Request, num_computed_tokens: int) -> None:
    num_prompt_tokens = len(request.prompt_token_ids)
    if request.num_computed_tokens < num_prompt_tokens:
        counters.num_prompt_tokens += (
            min(num_computed_tokens, num_prompt_tokens) - request.num_computed_tokens
        )
