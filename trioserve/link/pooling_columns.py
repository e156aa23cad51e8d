"""Packing of what was pooled into arrays, and the way back."""

from __future__ import annotations

from array import array
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import attrs

from trioserve.link.messages import MessageError, PooledOutputs
from trioserve.outputs import FinishReason, PoolingOutput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from trioserve.core.pooling_request import PoolingResult
    from trioserve.core.stats import CoreStats

__all__ = ["PooledText", "pack_pooled", "split_pooled", "unpack_pooled"]

_WHOLE_TEXT = -1
"""In place of a number of rows."""
_MAX_VALUES = 2**21
"""Of one message, 8 MiB, unless a single text has more. The frontend sees to it that this fits a frame."""


class PooledText(NamedTuple):
    """What came of a text."""

    request_id: int
    finish_reason: FinishReason
    output: PoolingOutput | None
    """Set if the finish reason is STOP."""


def split_pooled(result: PoolingResult) -> Iterator[PoolingResult]:
    """`result`, in as many parts as it needs; each text is in one of them."""
    start = weight = 0
    for place, pooled in enumerate(result.pooled):
        own = 0 if pooled is None or pooled.data is None else pooled.data.size
        if place > start and weight + own > _MAX_VALUES:
            yield _part(result, slice(start, place))
            start, weight = place, 0
        weight += own
    yield result if start == 0 else _part(result, slice(start, None))


def _part(result: PoolingResult, texts: slice) -> PoolingResult:
    return attrs.evolve(
        result,
        request_ids=result.request_ids[texts],
        finish_reasons=result.finish_reasons[texts],
        pooled=result.pooled[texts],
        freed=() if texts.start else result.freed,
    )


def pack_pooled(result: PoolingResult, stats: CoreStats) -> PooledOutputs:
    """The message for what a step gave."""
    arrays = [None if pooled is None else pooled.data for pooled in result.pooled]
    return PooledOutputs(
        request_ids=array("q", result.request_ids).tobytes(),
        finish_reasons=bytes(result.finish_reasons),
        num_rows=array("i", map(_num_rows, arrays)).tobytes(),
        num_values=array("i", [0 if own is None else own.size for own in arrays]).tobytes(),
        values=b"".join(own.astype("f4", copy=False).tobytes() for own in arrays if own is not None),
        stats=stats,
        freed=array("q", result.freed).tobytes() if result.freed else b"",
    )


def _num_rows(own: np.ndarray | None) -> int:
    return _WHOLE_TEXT if own is None or own.ndim == 1 else len(own)


def unpack_pooled(outputs: PooledOutputs) -> Sequence[PooledText]:
    """One per text of the step.

    Raises:
      MessageError: the columns do not fit together.
    """
    try:
        return list(_unpack(outputs))
    except ValueError as error:
        raise MessageError(f"PooledOutputs: {error}") from error


def _unpack(outputs: PooledOutputs) -> Iterator[PooledText]:
    values = array("f", outputs.values)
    counts = array("i", outputs.num_values)
    ends = list(accumulate(counts, initial=0))
    if ends[-1] != len(values) or min(counts, default=0) < 0:
        raise ValueError(f"{list(counts)} values are not {len(values)}")
    columns = zip(
        array("q", outputs.request_ids),
        outputs.finish_reasons,
        array("i", outputs.num_rows),
        pairwise(ends),
        strict=True,
    )
    for request_id, code, num_rows, (start, end) in columns:
        reason, output = FinishReason(code), None
        if reason is FinishReason.STOP:
            output = PoolingOutput(values[start:end], None if num_rows == _WHOLE_TEXT else num_rows)
        yield PooledText(request_id, reason, output)
