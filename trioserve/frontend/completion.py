"""One completion while it grows: tokens come in from the engine, text and logprobs go out to the consumer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.frontend.detokenizer import Detokenizer
from trioserve.frontend.logprobs import named_logprobs
from trioserve.frontend.stop_strings import StopStrings
from trioserve.outputs import REPETITION_DETECTED, CompletionOutput, FinishReason
from trioserve.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.link.columns import RequestUpdate
    from trioserve.sampling_params import SamplingParams
    from trioserve.worker.batch import LogprobRow

__all__ = ["Completion"]


class Completion:
    """The state of one of a request's n completions.

    `push` is called by the reader task and `take` by the consumer; both are synchronous. What has come since
    the last `take` is merged, so a consumer that is behind gets one output for many tokens. The memory it
    holds is bounded by the request's max_tokens.
    """

    def __init__(
        self, index: int, params: SamplingParams, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_prompt_tokens = len(prompt_token_ids)
        self.finish_reason: FinishReason | None = None
        self.has_news = False
        self._stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._keeps_all = params.output_kind is not RequestOutputKind.DELTA
        self._min_tokens = params.min_tokens
        self._includes_stop = params.include_stop_str_in_output
        self._flat_logprobs = params.flat_logprobs
        self._detokenizer = (
            Detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                context=prompt_token_ids,
            )
            if params.detokenize
            else None
        )
        self._stop_strings = (
            StopStrings(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        )
        # Not yet taken; where all is kept (_keeps_all), everything so far.
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[LogprobRow] | None = [] if params.reports_logprobs else None
        self._cumulative_logprob = 0.0

    def push(self, update: RequestUpdate) -> None:
        """Take in what a step brought. Afterwards `finish_reason` says whether the completion has ended:
        by the engine's word, or by a stop string, of which the engine knows nothing."""
        token_ids, rows, reason = update.token_ids, update.logprobs, update.finish_reason
        if reason is None and rows is None and self._stop_strings is None:  # as nearly all are
            for token_id in token_ids:
                self._push_token(token_id, silent=False)
            self.has_news = self.has_news or bool(token_ids)
            return
        stop_reason = REPETITION_DETECTED if reason is FinishReason.REPETITION else update.stop_token_id
        ends_by_token = reason is FinishReason.STOP and not update.completes_grammar
        for position, token_id in enumerate(token_ids):
            ends_here = ends_by_token and position == len(token_ids) - 1
            self._push_token(token_id, silent=ends_here and not self._includes_stop)
            if rows is not None and self._logprobs is not None:
                self._logprobs.append(rows[position])
                self._cumulative_logprob += rows[position].logprobs[0]
            if self._matched is not None:
                self.finish(FinishReason.STOP, self._matched)
                return
        self.has_news = self.has_news or bool(token_ids)
        if reason is not None:
            self.finish(reason, stop_reason)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End it. Text that was held back is let go, in which a stop string may still be found."""
        if self._matched is None and (found := self._flush_text()) is not None:
            reason, stop_reason = FinishReason.STOP, found
        self.finish_reason, self._stop_reason, self.has_news = reason, stop_reason, True

    def fail(self) -> None:
        """End it with an error, whatever state it is in."""
        self.finish_reason, self._stop_reason, self.has_news = FinishReason.ERROR, None, True

    @property
    def logprob_rows(self) -> Sequence[LogprobRow]:
        """Of the tokens that were not taken yet."""
        return self._logprobs or ()

    @property
    def _matched(self) -> str | None:
        return None if self._stop_strings is None else self._stop_strings.matched

    def take(self) -> CompletionOutput:
        """What is new since the last call, or everything so far, by the request's output kind."""
        self.has_news = False
        text = "".join(self._text)
        output = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self._token_ids if not self._keeps_all else list(self._token_ids),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None
            if self._logprobs is None
            else named_logprobs(self._logprobs, self._tokenizer, flat=self._flat_logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )
        if self._keeps_all:
            self._text = [text]
        else:
            self._text, self._token_ids = [], []
            self._logprobs = None if self._logprobs is None else []
        return output

    def _push_token(self, token_id: int, *, silent: bool) -> None:
        self.num_tokens += 1
        self._token_ids.append(token_id)
        if self._detokenizer is None or silent:  # the text of a stop token is not shown
            return
        self._show(self._detokenizer.push(token_id))

    def _show(self, text: str) -> None:
        if self._stop_strings is not None:
            text = self._stop_strings.push(text, armed=self.num_tokens > self._min_tokens)
        if text:
            self._text.append(text)

    def _flush_text(self) -> str | None:
        """Returns the stop string that it completed, if any."""
        if self._detokenizer is not None:
            self._show(self._detokenizer.flush())
        if self._stop_strings is not None and self._matched is None:
            self._text.append(self._stop_strings.flush())
        return self._matched
