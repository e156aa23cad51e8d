"""A text that is pooled: in the bookkeeping of requests, a completion that gets no tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.errors import UnfinishedError
from trioserve.frontend.completion import Completion
from trioserve.outputs import FinishReason
from trioserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.link.pooling_columns import PooledText
    from trioserve.outputs import PoolingOutput

__all__ = ["PooledCompletion", "no_result"]

_REASONS = {
    FinishReason.ABORT: "the request was aborted",
    FinishReason.DEADLINE: "its deadline passed before its turn came",
}
_NO_TEXT = SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


class PooledCompletion(Completion):
    """Ends with its one result, or without one, as its `finish_reason` says: STOP if there is one."""

    def __init__(self, index: int, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        super().__init__(index, _NO_TEXT, tokenizer, prompt_token_ids)
        self.prompt_token_ids = prompt_token_ids
        self.pooled: PoolingOutput | None = None

    def take_in(self, text: PooledText) -> None:
        """What the engine has made of it."""
        self.pooled = text.output
        self.finish(text.finish_reason)


def no_result(reason: FinishReason) -> UnfinishedError:
    """What a request raises of which a text has ended without a result."""
    why = _REASONS.get(reason, "it failed inside the engine")
    return UnfinishedError(f"A text was not pooled: {why}.", reason=reason)
