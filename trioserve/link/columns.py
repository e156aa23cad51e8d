"""Packing of step outputs into arrays, and the way back."""

from __future__ import annotations

from array import array
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from trioserve.link.messages import LogprobColumns, MessageError, StepOutputs
from trioserve.outputs import FinishReason
from trioserve.worker.batch import LogprobRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from trioserve.core.stats import CoreStats
    from trioserve.core.step_result import StepResult
    from trioserve.link.messages import PooledOutputs

__all__ = ["RequestUpdate", "pack_step", "unpack_freed", "unpack_step", "unpack_token_ids"]

_NO_STOP_TOKEN = -1
_GRAMMAR_COMPLETE = -2
"""In place of a stop token."""


class RequestUpdate(NamedTuple):
    """What one step brought for one request. A tuple: one is made per token, and none is made sooner."""

    request_id: int
    token_ids: Sequence[int]
    finish_reason: FinishReason | None
    stop_token_id: int | None
    num_cached_tokens: int
    logprobs: Sequence[LogprobRow] | None
    """One row per entry of `token_ids`; None where none were asked for."""
    completes_grammar: bool = False
    """It ended with FinishReason.STOP, and its last token is text all the same."""
    prompt_logprobs: Sequence[LogprobRow] = ()
    """Of the prompt positions that follow those of the request's updates before; the first ever is 1."""


def unpack_token_ids(data: bytes) -> array[int]:
    """int32 bytes as token ids."""
    return array("i", data)


def pack_step(result: StepResult, stats: CoreStats) -> StepOutputs:
    """The message for what a step gave."""
    prompt_rows = list(chain.from_iterable(result.prompt_logprobs))
    return StepOutputs(
        request_ids=array("q", result.request_ids).tobytes(),
        num_tokens=array("i", map(len, result.token_ids)).tobytes(),
        token_ids=array("i", chain.from_iterable(result.token_ids)).tobytes(),
        finish_reasons=bytes(reason or 0 for reason in result.finish_reasons),
        stop_token_ids=array("i", _stop_column(result)).tobytes(),
        num_cached_tokens=array("i", result.num_cached_tokens).tobytes(),
        logprobs=_pack_logprobs([token.logprobs for token in chain.from_iterable(result.sampled)]),
        num_prompt_logprobs=array("i", map(len, result.prompt_logprobs)).tobytes() if prompt_rows else b"",
        prompt_logprobs=_pack_logprobs(prompt_rows),
        stats=stats,
        freed=array("q", result.freed).tobytes() if result.freed else b"",
    )


def _stop_column(result: StepResult) -> list[int]:
    column = [_NO_STOP_TOKEN if token is None else token for token in result.stop_token_ids]
    if result.completed_grammars:
        for place, request_id in enumerate(result.request_ids):
            if request_id in result.completed_grammars:
                column[place] = _GRAMMAR_COMPLETE
    return column


def _pack_logprobs(rows: Sequence[LogprobRow | None]) -> LogprobColumns | None:
    present = [row for row in rows if row is not None]
    if not present:
        return None
    return LogprobColumns(
        widths=array("i", [0 if row is None else len(row.token_ids) for row in rows]).tobytes(),
        token_ids=_pack("i", (row.token_ids for row in present)),
        logprobs=_pack("f", (row.logprobs for row in present)),
        ranks=_pack("i", (row.ranks for row in present)),
    )


def _pack(typecode: str, columns: Iterable[Sequence[float]]) -> bytes:
    return array(typecode, chain.from_iterable(columns)).tobytes()


def unpack_step(outputs: StepOutputs) -> Iterator[RequestUpdate]:
    """One update per request of the step.

    Raises:
      MessageError: the columns do not fit together.
    """
    try:
        yield from _unpack_step(outputs)
    except ValueError as error:
        raise MessageError(f"StepOutputs: {error}") from error


def unpack_freed(outputs: StepOutputs | PooledOutputs) -> Sequence[int]:
    """The ids of aborted sequences that are free.

    Raises:
      MessageError: the column is malformed.
    """
    try:
        return array("q", outputs.freed)
    except ValueError as error:
        raise MessageError(f"{type(outputs).__name__}.freed: {error}") from error


def _unpack_step(outputs: StepOutputs) -> Iterator[RequestUpdate]:
    request_ids = array("q", outputs.request_ids)
    num_tokens = array("i", outputs.num_tokens)
    token_ids = array("i", outputs.token_ids)
    columns = zip(
        request_ids,
        _slices(num_tokens, len(token_ids)),
        outputs.finish_reasons,
        array("i", outputs.stop_token_ids),
        array("i", outputs.num_cached_tokens),
        _prompt_rows(outputs, len(request_ids)),
        strict=True,
    )
    rows = None if outputs.logprobs is None else _unpack_logprobs(outputs.logprobs, len(token_ids))
    for request_id, own, reason, stop_token_id, num_cached_tokens, prompt_rows in columns:
        own_rows = None if rows is None else rows[own]
        # By position: keywords cost as much again.
        yield RequestUpdate(
            request_id,
            token_ids[own],
            FinishReason(reason) if reason else None,
            None if stop_token_id < 0 else stop_token_id,
            num_cached_tokens,
            own_rows if own_rows and own_rows[0].token_ids else None,
            stop_token_id == _GRAMMAR_COMPLETE,
            prompt_rows,
        )


def _prompt_rows(outputs: StepOutputs, num_requests: int) -> Iterable[Sequence[LogprobRow]]:
    if outputs.prompt_logprobs is None:
        return [()] * num_requests
    counts = array("i", outputs.num_prompt_logprobs)
    rows = _unpack_logprobs(outputs.prompt_logprobs, sum(counts))
    return [rows[own] for own in _slices(counts, len(rows))]


def _slices(counts: Sequence[int], total: int) -> list[slice]:
    """Consecutive ones of these lengths, which must cover `total` entries."""
    ends = list(accumulate(counts, initial=0))
    if ends[-1] != total or any(count < 0 for count in counts):
        raise ValueError(f"{list(counts)} entries are not {total}")
    return [slice(start, end) for start, end in pairwise(ends)]


def _unpack_logprobs(columns: LogprobColumns, num_tokens: int) -> list[LogprobRow]:
    widths = array("i", columns.widths)
    token_ids, logprobs, ranks = (
        array("i", columns.token_ids),
        array("f", columns.logprobs),
        array("i", columns.ranks),
    )
    if not (len(widths) == num_tokens and len(token_ids) == len(ranks) == len(logprobs)):
        raise ValueError(f"the logprobs of {num_tokens} tokens do not fit together")
    return [LogprobRow(token_ids[own], logprobs[own], ranks[own]) for own in _slices(widths, len(token_ids))]
