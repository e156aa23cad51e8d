"""A window of a transcription, on the engine: one question after the other, until its text is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.errors import UnfinishedError
from trioserve.frontend.detokenizer import Detokenizer
from trioserve.frontend.hearing import Answer
from trioserve.frontend.input_processor import Routing
from trioserve.frontend.prompts import AudioPrompt
from trioserve.frontend.requests import Requests
from trioserve.outputs import FinishReason
from trioserve.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trioserve.audio.splitting import Window
    from trioserve.frontend.channel import OutputChannel
    from trioserve.frontend.hearing import Heard, Hearing, Listener, Question
    from trioserve.outputs import RequestOutput, TokenLogprobs

__all__ = ["EngineAccess", "WindowRun", "cut_short"]

_CUT_SHORT = {FinishReason.ABORT, FinishReason.ERROR, FinishReason.DEADLINE}


def cut_short(reason: FinishReason) -> UnfinishedError:
    """What a transcription raises of which a part did not come to its end by itself."""
    return UnfinishedError(f"the transcription was cut short: {reason}", reason=reason)


@attrs.frozen(kw_only=True, eq=False)
class EngineAccess:
    """How a transcription asks the engine. All of its requests have one name, and a place that it holds."""

    requests: Requests
    routing: Routing
    request_id: str

    async def ask(self, samples: bytes, question: Question, *, streams: bool = False) -> OutputChannel:
        """The answer's channel, which must be released. Raises as `Requests.submit` does."""
        kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
        return await self.requests.submit(
            AudioPrompt(samples, question.token_ids, search=question.search),
            attrs.evolve(question.params, output_kind=kind),
            self.routing,
            request_id=self.request_id,
            has_place=True,
        )


class WindowRun:
    """Drives a hearing. Nothing here waits but `ask`, so one task can have many of them.

    A cancellation in `ask` leaves the question to be asked again.
    """

    def __init__(
        self,
        window: Window,
        samples: bytes,
        listener: Listener,
        watcher: Callable[[], None],
        *,
        shows_text_at_once: bool,
    ) -> None:
        """`watcher` is called when there is something to `collect`."""
        self.window = window
        self.heard: Heard | None = None
        """Once it is done."""
        self.times: Sequence[float] | None = None
        """Seconds at which its text tokens begin, and at last where the text ends: once `align` is done."""
        self.num_prompt_tokens = self.num_generation_tokens = 0
        """Of the last question about its text."""
        self._samples = samples
        self._watcher = watcher
        self._hearing: Hearing = listener.hear()
        self._question: Question | None = next(self._hearing)
        self._channel: OutputChannel | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._eot = listener.tokens.eot
        self._before_text = listener.before_text()
        self._shows_text_at_once = shows_text_at_once
        self._detokenizer = Detokenizer(listener.tokenizer, skip_special_tokens=True)
        self._text: list[str] = []  # that is final, and was not taken yet

    @property
    def has_question(self) -> bool:
        """There is something to `ask`."""
        return self._question is not None and self._channel is None

    @property
    def has_news(self) -> bool:
        """There is something to `collect`."""
        return self._channel is not None and self._channel.has_news

    async def ask(self, engine: EngineAccess) -> None:
        """Ask what is to be asked next."""
        assert self._question is not None
        streams = self._shows_text_at_once and self._question.is_text
        self._channel = await engine.ask(self._samples, self._question, streams=streams)
        self._channel.watcher = self._watcher

    async def align(self, engine: EngineAccess) -> None:
        """Find out when the tokens of what was heard are said. A cancellation leaves it to be done again."""
        assert self.heard is not None
        *prompt, last = self._before_text
        # What the decoder looks at while it reads a token is where the next one is said.
        tokens = [last, *(token for token in self.heard.token_ids if token < self._eot)]
        self.times = await engine.requests.align(AudioPrompt(self._samples, prompt), tokens)

    def collect(self, engine: EngineAccess) -> None:
        """Take what the engine has said since. Not a checkpoint.

        Raises:
          UnfinishedError: an answer is not whole.
          EngineDeadError: the engine died under it.
        """
        if self._channel is None or not self._channel.has_news:
            return
        output = self._channel.take_nowait()
        completion = output.outputs[0]
        self._token_ids += completion.token_ids
        self._logprobs += completion.logprobs or ()
        if self._shows_text_at_once and self._question is not None and self._question.is_text:
            self._text += [
                self._detokenizer.push(token) for token in completion.token_ids if token < self._eot
            ]
        if completion.finish_reason is not None:
            self.release(engine)
            self._end_answer(output, completion.finish_reason)

    def _end_answer(self, output: RequestOutput, reason: FinishReason) -> None:
        if reason in _CUT_SHORT:
            raise cut_short(reason)
        question, self._question = self._question, None
        assert question is not None
        answer = Answer(token_ids=self._token_ids, logprobs=self._logprobs)
        self._token_ids, self._logprobs = [], []
        if question.is_text:
            self.num_prompt_tokens = len(output.prompt_token_ids)
            self.num_generation_tokens = len(answer.token_ids)
        try:
            self._question = self._hearing.send(answer)
        except StopIteration as end:
            self._end(end.value)

    def _end(self, heard: Heard) -> None:
        self.heard = heard
        self._text.append(self._detokenizer.flush() if self._shows_text_at_once else heard.text)

    def take_text(self) -> str:
        """What is final of its text, and was not taken before."""
        text, self._text = "".join(self._text), []
        return text

    def release(self, engine: EngineAccess) -> None:
        """End what runs of it in the engine. Not a checkpoint. A second call does nothing."""
        if self._channel is not None:
            engine.requests.release(self._channel)
            self._channel = None
