"""Speech of any length to text, as a scope.

The audio is cut into windows of at most 30 seconds, at quiet points. Several windows at a time are heard by
the engine, each by requests of its own; what they give is put together in their order. All of it is driven by
whoever reads the stream, without tasks: so a stream can be opened in one cancel scope and closed in another,
as an HTTP response needs it, and one that is not read asks nothing new of the engine.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import attrs
import trio

from trioserve.audio_input import MAX_AUDIO_SECONDS, SAMPLING_RATE
from trioserve.errors import ClosedError, InvalidRequestError
from trioserve.frontend.arguments import check_request_id
from trioserve.frontend.audio_intake import AudioIntake
from trioserve.frontend.hearing import Answer, Listener
from trioserve.frontend.languages import find_language
from trioserve.frontend.requests import Requests
from trioserve.frontend.speech_segments import cut_at_timestamps, unheard_from
from trioserve.frontend.speech_tokens import SpeechTokens
from trioserve.frontend.speech_words import find_words
from trioserve.frontend.transcription_outputs import SpeechSegment, Transcription, TranscriptionUpdate
from trioserve.frontend.window_run import EngineAccess, WindowRun, cut_short
from trioserve.validators import shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Sequence
    from types import TracebackType

    from trioserve.audio.limits import AudioLimits
    from trioserve.audio.splitting import Window
    from trioserve.frontend.admission import Place
    from trioserve.frontend.audio_intake import Audio, HeldSpeech
    from trioserve.frontend.hearing import Heard
    from trioserve.frontend.input_processor import Routing
    from trioserve.frontend.transcription_outputs import SpeechWord
    from trioserve.frontend.transcription_params import TranscriptionParams

__all__ = ["Transcriber", "TranscriptionStream"]

_MOST_WINDOWS = 8
"""Of one transcription under way at a time: each takes some megabytes here and there."""


@attrs.frozen(kw_only=True, eq=False)
class Transcriber:
    """What all transcriptions of one AsyncLLM share."""

    requests: Requests
    tokens: SpeechTokens
    intake: AudioIntake
    count_audio: Callable[[float], None]
    """Told the seconds of each audio."""
    context_length: int
    most_seats: int
    """Sequences that the engine runs at a time."""

    def listener(self, params: TranscriptionParams) -> Listener:
        """
        Raises:
          InvalidRequestError: the model does not know the language, or translates nothing.
        """
        return Listener(
            tokens=self.tokens,
            tokenizer=self.requests.tokenizer,
            params=params,
            context_length=self.context_length,
            language=self._language(params),
        )

    def _language(self, params: TranscriptionParams) -> str | None:
        is_multilingual = self.tokens.is_multilingual
        if params.task == "translate" and not is_multilingual:
            raise InvalidRequestError(
                "task must be transcribe, got translate: this model knows English alone.", parameter="task"
            )
        known = sorted(self.tokens.languages) if is_multilingual else ["en"]
        if params.language is None:
            return None if is_multilingual else "en"
        code = find_language(params.language)
        if code not in known:
            raise InvalidRequestError(
                f"language must be one of {', '.join(known)}, got {shown(params.language)}.",
                parameter="language",
            )
        return code


class TranscriptionStream:
    """One transcription: an async context manager, and an async iterator of what is new of it.

    Text comes as the engine writes it if `params.temperature` is one number and `beam_width` 1, else by
    windows: until a window has ended, its text may be thrown away. Segments come by windows. Each step is a
    checkpoint; a cancellation loses nothing.

    Leaving it by any path ends all of its requests in the engine, synchronously.
    """

    duration: float
    """Seconds of audio. Known once it is open."""

    def __init__(
        self,
        transcriber: Transcriber,
        audio: Audio,
        params: TranscriptionParams,
        *,
        limits: AudioLimits | None,
        route: Callable[[], Awaitable[Routing]],
        request_id: str | None,
    ) -> None:
        check_request_id(request_id)
        self._transcriber = transcriber
        self._audio = audio
        self._params = params
        self._limits = limits
        self._route = route
        self.request_id = request_id or f"transcription-{uuid.uuid4().hex}"
        self._opened = False
        self._held: HeldSpeech | None = None
        self._place: Place | None = None
        self._windows: Iterator[Window] = iter(())
        self._running: deque[WindowRun] = deque()  # in the order of time; the ends of later ones wait here
        self._news = trio.lowlevel.ParkingLot()
        self._texts: list[str] = []
        self._segments: list[SpeechSegment] = []
        self._num_prompt_tokens = self._num_generation_tokens = 0
        self._ended = False

    # Its life

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    async def open(self) -> None:
        """Decode the audio and, where that was not said, find its language; `release` must follow, unless it
        raises.

        Raises:
          InvalidRequestError: it is no audio, is too much of it, or the model does not know the language.
          OverloadedError: there is no room for it in the engine at present.
          EngineDeadError: the engine core is gone.
          UnfinishedError: the engine did not come to the end.
        """
        if self._opened:
            raise ClosedError("A transcription can be opened once.")
        self._opened = True
        try:
            await self._open()
        except BaseException:
            self.release()
            raise

    async def _open(self) -> None:
        # Imported here: it needs numpy, which only a model that hears does.
        from trioserve.audio.limits import AudioLimits  # noqa: PLC0415
        from trioserve.audio.splitting import most_windows, split_at_quiet  # noqa: PLC0415

        self._listener = self._transcriber.listener(self._params)
        self._engine = EngineAccess(
            requests=self._transcriber.requests, routing=await self._route(), request_id=self.request_id
        )
        self._held = await self._transcriber.intake.take(self._audio, self._limits or AudioLimits())
        self._audio = b""  # the file is not needed any more
        self.duration = self._held.speech.duration
        self._windows = split_at_quiet(self._held.speech.samples)
        self._most_windows = min(most_windows(self.duration), _MOST_WINDOWS, self._transcriber.most_seats)
        self._place = self._transcriber.requests.admission.reserve(self._most_windows)
        self._transcriber.count_audio(self.duration)
        if self._listener.language is None:
            self._listener = attrs.evolve(self._listener, language=await self._find_language())

    async def _find_language(self) -> str:
        """By the first window."""
        first = self._samples(0, MAX_AUDIO_SECONDS * SAMPLING_RATE)
        finding = self._listener.find_language()
        channel = await self._engine.ask(first, next(finding))
        try:
            output = await channel.take()
        finally:
            self._transcriber.requests.release(channel)
        completion = output.outputs[0]
        if not completion.token_ids:
            assert completion.finish_reason is not None
            raise cut_short(completion.finish_reason)
        try:
            finding.send(Answer(token_ids=completion.token_ids, logprobs=()))
        except StopIteration as found:
            return str(found.value)
        raise AssertionError("a language is found by one question")

    def release(self) -> None:
        """End it. Not a checkpoint. A second call does nothing."""
        self._ended = True
        while self._running:
            self._running.popleft().release(self._engine)
        if self._place is not None:
            self._place.close()
        if self._held is not None:
            self._held.release()
            self._held = None

    # What it gives

    @property
    def language(self) -> str:
        """A code: what is spoken, as was said or heard. Known once it is open."""
        return self._listener.language or "en"

    @property
    def result(self) -> Transcription:
        """All that came so far: the whole, once the iteration has ended."""
        return Transcription(
            request_id=self.request_id,
            text="".join(self._texts),
            language=self.language,
            duration=self.duration,
            segments=list(self._segments),
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
        )

    async def finish(self) -> Transcription:
        """Read it to its end."""
        async for _ in self:
            pass
        return self.result

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TranscriptionUpdate:
        """What is new: text that is not empty, or segments.

        Raises:
          UnfinishedError: the engine did not come to the end of a window.
          EngineDeadError: the engine core is gone.
        """
        await trio.lowlevel.checkpoint()
        while not self._ended:
            await self._ask()
            if not self._running:
                self.release()
                break
            update = await self._collect()
            if update.text or update.segments:
                return update
            if self._running and not self._has_something_to_do():
                await self._news.park()
        raise StopAsyncIteration

    def _note(self) -> None:
        """A window has news."""
        self._news.unpark_all()

    def _has_something_to_do(self) -> bool:
        return self._running[0].heard is not None or any(
            run.has_question or run.has_news for run in self._running
        )

    async def _ask(self) -> None:
        """Begin windows while there is room, and ask what is to be asked of those that run."""
        while len(self._running) < self._most_windows and (window := next(self._windows, None)) is not None:
            self._running.append(self._begin(window))
        for run in list(self._running):
            if run.has_question:
                await run.ask(self._engine)

    def _begin(self, window: Window) -> WindowRun:
        return WindowRun(
            window,
            self._samples(window.start, window.end),
            self._listener,
            self._note,
            shows_text_at_once=not self._params.is_tentative,
        )

    def _samples(self, start: int, end: int) -> bytes:
        assert self._held is not None
        return self._held.speech.samples[start:end].tobytes()

    async def _collect(self) -> TranscriptionUpdate:
        """Take what there is. Text of the first window is shown as it comes, that of others once they are
        first. A checkpoint only where words have to be found."""
        for run in self._running:
            run.collect(self._engine)
        first = self._running[0]
        if self._params.timestamps == "word" and first.heard is not None and first.heard.text.strip():
            await first.align(self._engine)
        text = self._say(first.take_text())
        segments: Sequence[SpeechSegment] = ()
        if first.heard is not None:
            self._running.popleft()
            segments = self._end(first, first.heard)
        return TranscriptionUpdate(text=text, segments=segments)

    def _say(self, text: str) -> str:
        """The space before the first word is the model's way of writing, and not part of the text."""
        if not self._texts:
            text = text.lstrip()
        if text:
            self._texts.append(text)
        return text

    def _end(self, run: WindowRun, heard: Heard) -> Sequence[SpeechSegment]:
        self._num_prompt_tokens += run.num_prompt_tokens
        self._num_generation_tokens += run.num_generation_tokens
        window, tokens = run.window, self._listener.tokens
        rest = unheard_from(heard.token_ids, tokens, window.duration)
        if rest is not None:
            left = attrs.evolve(window, start=window.start + round(rest * SAMPLING_RATE))
            self._running.appendleft(self._begin(left))
        segments = list(self._make_segments(window, heard, run.times))
        self._segments += segments
        return segments

    def _make_segments(
        self, window: Window, heard: Heard, times: Sequence[float] | None
    ) -> Iterator[SpeechSegment]:
        tokens, tokenizer = self._listener.tokens, self._listener.tokenizer
        pieces = cut_at_timestamps(heard.token_ids, tokens, window.duration)
        num_before = 0
        for number, piece in enumerate(pieces, len(self._segments)):
            spoken = [token for token in piece.token_ids if token < tokens.eot]
            own_times = None if times is None else times[num_before : num_before + len(spoken) + 1]
            num_before += len(spoken)
            yield SpeechSegment(
                id=number,
                seek=round(window.offset * 100),
                start=window.offset + piece.start,
                end=window.offset + piece.end,
                text=tokenizer.decode(spoken),
                tokens=piece.token_ids,
                temperature=heard.temperature,
                avg_logprob=heard.avg_logprob,
                compression_ratio=heard.compression_ratio,
                no_speech_prob=heard.no_speech_prob or 0.0,
                words=() if own_times is None else self._words(window, spoken, own_times),
            )

    def _words(self, window: Window, spoken: Sequence[int], times: Sequence[float]) -> list[SpeechWord]:
        shifted = [window.offset + min(time, window.duration) for time in times]
        return find_words(spoken, shifted, self._listener.tokenizer, language=self.language)
