"""One text, from its arrival in a core that pools to its end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from trioserve.core.request import RequestStatus
from trioserve.outputs import FinishReason
from trioserve.pooling_params import PoolingParams
from trioserve.worker.pooling_batch import PooledSequence, PoolingSequence

__all__ = ["CorePoolingRequest", "PoolingRequest", "PoolingResult", "to_pooling_request"]


@attrs.frozen(kw_only=True, eq=False)
class CorePoolingRequest:
    """What a client asks for: one text. `params.task` is set."""

    request_id: int
    """Unique among the requests of the core."""
    prompt_token_ids: Sequence[int]
    token_type_ids: Sequence[int] | None = None
    """As in `PoolingSequence`."""
    params: PoolingParams
    priority: int = 0
    deadline: float = math.inf
    """Of the scheduler's clock, in seconds."""


@attrs.define(kw_only=True, eq=False)
class PoolingRequest:
    """The state of one text; `PoolingCore` owns it and is the only one to change it."""

    sequence: PoolingSequence
    priority: int
    deadline: float
    arrival: int
    """Counts up in the order in which requests were added."""
    status: RequestStatus = RequestStatus.WAITING
    """It is never preempted: the step that takes it up computes all of it."""
    finish_reason: FinishReason | None = None
    """Invariant: set if and only if the status is FINISHED."""
    pooled: PooledSequence | None = None
    """Set where the finish reason is STOP or ERROR."""

    @property
    def request_id(self) -> int:
        return self.sequence.request_id

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self.sequence.token_ids


def to_pooling_request(new: CorePoolingRequest, *, arrival: int, max_model_len: int) -> PoolingRequest:
    """The state of a new request.

    Raises:
      ValueError: its task is not set, or the text is empty or longer than the model's context.
    """
    if not 0 < len(new.prompt_token_ids) <= max_model_len:
        raise ValueError(
            f"the text must have 1 to {max_model_len} tokens (max_model_len), got {len(new.prompt_token_ids)}"
        )
    if new.params.task is None:
        raise ValueError("the task must be set")
    sequence = PoolingSequence(
        request_id=new.request_id,
        token_ids=new.prompt_token_ids,
        token_type_ids=new.token_type_ids,
        params=new.params,
    )
    return PoolingRequest(sequence=sequence, priority=new.priority, deadline=new.deadline, arrival=arrival)


@attrs.frozen(kw_only=True, eq=False)
class PoolingResult:
    """What a step gave: parallel lists with one entry per text that has ended."""

    request_ids: Sequence[int] = ()
    finish_reasons: Sequence[FinishReason] = ()
    pooled: Sequence[PooledSequence | None] = ()
    """None where the text was not computed."""
    failures: Sequence[str] = ()
    """Why texts have ended with FinishReason.ERROR, for the log."""
    freed: Sequence[int] = ()
    """As in `trioserve.core.step_result.StepResult`."""

    @classmethod
    def of(cls, requests: Sequence[PoolingRequest], freed: Sequence[int] = ()) -> PoolingResult:
        """Of requests that have ended."""
        pooled = [request.pooled for request in requests]
        return cls(
            request_ids=[request.request_id for request in requests],
            finish_reasons=[request.finish_reason or FinishReason.ERROR for request in requests],
            pooled=pooled,
            failures=[
                f"request {request.request_id}: {own.failure}"
                for request, own in zip(requests, pooled, strict=True)
                if own is not None and own.failure is not None
            ],
            freed=freed,
        )
