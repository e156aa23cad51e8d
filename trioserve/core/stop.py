"""When does a sequence end by itself?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.core.request import Request
    from trioserve.sampling_params import RepetitionDetection

__all__ = ["Stop", "find_stop", "repeats_itself"]


@attrs.frozen
class Stop:
    """Why, and by which of the request's own stop tokens."""

    reason: FinishReason
    token_id: int | None = None


_EOS = Stop(FinishReason.STOP)
_LENGTH = Stop(FinishReason.LENGTH)
_REPETITION = Stop(FinishReason.REPETITION)


def find_stop(request: Request) -> Stop | None:
    """Whether the last token of a request ends it; called once after each token.

    In this order: EOS, the request's stop token ids (neither of them before `min_tokens`), length,
    repetition. So a stop token that is also the last one allowed counts as a stop, and EOS wins where it is
    listed as both. A grammar that is complete with it (`trioserve.core.progress`) counts before length
    and repetition. Stop strings are the frontend's: the core knows no text.
    """
    token_id = request.output_token_ids[-1]
    if token_id in request.stop_token_ids and len(request.output_token_ids) >= request.params.min_tokens:
        return _EOS if token_id in request.eos_token_ids else Stop(FinishReason.STOP, token_id)
    if request.num_known_tokens >= request.max_known_tokens:
        return _LENGTH
    detection = request.params.repetition_detection
    if detection is not None and repeats_itself(request.output_token_ids, detection):
        return _REPETITION
    return None


def repeats_itself(token_ids: Sequence[int], detection: RepetitionDetection) -> bool:
    """Do the last tokens consist of one pattern, `min_count` times in a row?

    Asked after each token, so it need only look for patterns that end here. Most sizes are ruled out by one
    comparison: the last token must be that of the pattern before.
    """
    last = token_ids[-1]
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        length = size * detection.min_count
        if length > len(token_ids):
            return False
        if token_ids[-1 - size] == last and token_ids[-length:-size] == token_ids[size - length :]:
            return True
    return False
