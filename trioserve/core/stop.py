"""When does a sequence end by itself?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from trioserve.core.request import Request

__all__ = ["Stop", "find_stop"]


@attrs.frozen
class Stop:
    """Why, and by which of the request's own stop tokens."""

    reason: FinishReason
    token_id: int | None = None


_EOS = Stop(FinishReason.STOP)
_LENGTH = Stop(FinishReason.LENGTH)


def find_stop(request: Request) -> Stop | None:
    """Whether the last token of a request ends it; called once after each token.

    In this order: EOS, the request's stop token ids (neither of them before `min_tokens`), length. So a stop
    token that is also the last one allowed counts as a stop, and EOS wins where it is listed as both. Stop
    strings are the frontend's: the core knows no text.
    """
    token_id = request.output_token_ids[-1]
    if token_id in request.stop_token_ids and len(request.output_token_ids) >= request.params.min_tokens:
        return _EOS if token_id in request.eos_token_ids else Stop(FinishReason.STOP, token_id)
    if request.num_known_tokens >= request.max_known_tokens:
        return _LENGTH
    return None
