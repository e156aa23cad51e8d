"""Packing of step outputs into arrays, and the way back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

import attrs

from trioserve.link.messages import LogprobColumns, MessageError, StepOutputs
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trioserve.core.engine import StepResult
    from trioserve.core.stats import CoreStats
    from trioserve.worker.batch import SampledToken

__all__ = ["RequestUpdate", "TokenLogprobRow", "pack_step", "unpack_step", "unpack_token_ids"]

_NO_STOP_TOKEN = -1


@attrs.frozen(eq=False)
class TokenLogprobRow:
    """Logprobs of one position, the sampled token first (see `trioserve.worker.batch.SampledToken`)."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    ranks: Sequence[int]


@attrs.frozen(eq=False)
class RequestUpdate:
    """What one step brought for one request."""

    request_id: int
    token_ids: Sequence[int]
    finish_reason: FinishReason | None
    stop_token_id: int | None
    num_cached_tokens: int
    logprobs: Sequence[TokenLogprobRow] | None
    """One row per entry of `token_ids`; None where none were asked for."""


def unpack_token_ids(data: bytes) -> array[int]:
    """int32 bytes as token ids."""
    return array("i", data)


def pack_step(result: StepResult, stats: CoreStats) -> StepOutputs:
    """The message for what a step gave."""
    return StepOutputs(
        request_ids=array("q", result.request_ids).tobytes(),
        num_tokens=array("i", map(len, result.token_ids)).tobytes(),
        token_ids=array("i", chain.from_iterable(result.token_ids)).tobytes(),
        finish_reasons=bytes(reason or 0 for reason in result.finish_reasons),
        stop_token_ids=array(
            "i", [_NO_STOP_TOKEN if token is None else token for token in result.stop_token_ids]
        ).tobytes(),
        num_cached_tokens=array("i", result.num_cached_tokens).tobytes(),
        logprobs=_pack_logprobs(list(chain.from_iterable(result.sampled))),
        stats=stats,
    )


def _pack_logprobs(tokens: Sequence[SampledToken]) -> LogprobColumns | None:
    if not any(token.logprob_token_ids for token in tokens):
        return None
    return LogprobColumns(
        widths=array("i", [len(token.logprob_token_ids) for token in tokens]).tobytes(),
        token_ids=array("i", chain.from_iterable(token.logprob_token_ids for token in tokens)).tobytes(),
        logprobs=array("f", chain.from_iterable(token.logprobs for token in tokens)).tobytes(),
        ranks=array("i", chain.from_iterable(token.ranks for token in tokens)).tobytes(),
    )


def unpack_step(outputs: StepOutputs) -> Iterator[RequestUpdate]:
    """One update per request of the step.

    Raises:
      MessageError: the columns do not fit together.
    """
    try:
        token_ids = array("i", outputs.token_ids)
        rows = None if outputs.logprobs is None else _unpack_logprobs(outputs.logprobs, len(token_ids))
        columns = zip(
            array("q", outputs.request_ids),
            array("i", outputs.num_tokens),
            outputs.finish_reasons,
            array("i", outputs.stop_token_ids),
            array("i", outputs.num_cached_tokens),
            strict=True,
        )
        end = 0
        for request_id, count, reason, stop_token_id, num_cached_tokens in columns:
            start, end = end, end + count
            if not start <= end <= len(token_ids):
                raise ValueError(f"request {request_id} has tokens {start} to {end} of {len(token_ids)}")
            own_rows = None if rows is None or not count else rows[start:end]
            yield RequestUpdate(
                request_id=request_id,
                token_ids=token_ids[start:end],
                finish_reason=FinishReason(reason) if reason else None,
                stop_token_id=None if stop_token_id == _NO_STOP_TOKEN else stop_token_id,
                num_cached_tokens=num_cached_tokens,
                logprobs=None if own_rows is None or not own_rows[0].token_ids else own_rows,
            )
    except ValueError as error:
        raise MessageError(f"StepOutputs: {error}") from error


def _unpack_logprobs(columns: LogprobColumns, num_tokens: int) -> list[TokenLogprobRow]:
    ends = list(accumulate(array("i", columns.widths), initial=0))
    token_ids, logprobs, ranks = (
        array("i", columns.token_ids),
        array("f", columns.logprobs),
        array("i", columns.ranks),
    )
    if not (len(ends) == num_tokens + 1 and ends[-1] == len(token_ids) == len(ranks) == len(logprobs)):
        raise ValueError(f"the logprobs of {num_tokens} tokens do not fit together")
    return [
        TokenLogprobRow(token_ids[start:end], logprobs[start:end], ranks[start:end])
        for start, end in pairwise(ends)
    ]
