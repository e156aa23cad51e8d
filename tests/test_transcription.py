"""Speech to text: what the engine is asked, and what is made of its answers."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing

from helpers_audio import wav
from helpers_speech import (
    TOKENS,
    FakeHearing,
    eventually,
    open_hearing_llm,
    said,
    speech,
    timestamp,
    tokens_of,
)
from trioserve import AudioPrompt, InvalidRequestError, OverloadedError, SamplingParams, TranscriptionParams
from trioserve.audio.limits import AudioLimits
from trioserve.audio.speech import Speech
from trioserve.audio_input import SpeechSearch
from trioserve.errors import EngineDeadError, UnfinishedError
from trioserve.frontend.speech_words import find_words
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from trioserve.link.messages import Add
    from trioserve.worker.batch import SampledToken

PLAIN = TranscriptionParams(timestamps="none", temperature=(0,), beam_width=1, language="en")

Opener = Any


@pytest.fixture
def hearing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Opens an AsyncLLM that hears, and a task that answers what it asks."""

    @asynccontextmanager
    async def open_hearing(
        text: Callable[[Add, int], Sequence[SampledToken]] | Sequence[SampledToken] = (),
        *,
        engine_args: dict[str, Any] | None = None,
        **answers: Any,
    ) -> AsyncIterator[FakeHearing]:
        async with open_hearing_llm(tmp_path, monkeypatch, **(engine_args or {})) as fake:
            say = text if callable(text) else lambda _add, _index: text
            found = FakeHearing(fake, say, **answers)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(found.answer)
                yield found
                nursery.cancel_scope.cancel()

    return open_hearing


def heard_seconds(add: Add) -> float:
    assert add.audio is not None
    return len(add.audio.samples) / 4 / 16_000


# What is asked


async def test_a_short_clip_is_one_question(hearing: Opener) -> None:
    async with hearing(said(" Hello there.")) as fake:
        audio = speech(2)
        async with fake.fake.llm.transcribe(audio, PLAIN) as stream:
            result = await stream.finish()
        assert result.text == "Hello there."
        assert (result.language, result.duration) == ("en", 2)
        [segment] = result.segments
        assert (segment.id, segment.seek, segment.start, segment.end) == (0, 0, 0, 2)
        assert segment.text == " Hello there."
        assert list(segment.tokens) == tokens_of(" Hello there.")
        assert segment.avg_logprob == -0.25
        [question] = fake.questions
        assert question.audio.samples == audio.samples.tobytes()
        sot = [TOKENS.sot, TOKENS.languages["en"], TOKENS.transcribe, TOKENS.no_timestamps]
        assert np.frombuffer(question.prompt_token_ids, np.int32).tolist() == sot
        assert question.params.extra_args == {"timestamps": False}
        assert (question.params.temperature, question.params.max_tokens) == (0, 448 - 4)
        assert question.audio.search is None
        assert result.num_prompt_tokens == 4
        assert result.num_generation_tokens == len(" Hello there.") + 1


async def test_the_language_is_found_by_the_first_window(hearing: Opener) -> None:
    async with hearing(said(" Bonjour."), language="fr") as fake:
        params = TranscriptionParams(timestamps="none", task="translate")
        async with fake.fake.llm.transcribe(speech(40), params) as stream:
            assert stream.language == "fr"
            await stream.finish()
        first, *others = fake.questions
        assert set(first.params.allowed_token_ids) == set(TOKENS.languages.values())
        assert heard_seconds(first) == 30
        for question in others:
            assert np.frombuffer(question.prompt_token_ids, np.int32).tolist() == [
                TOKENS.sot,
                TOKENS.languages["fr"],
                TOKENS.translate,
                TOKENS.no_timestamps,
            ]


async def test_prompt_and_hotwords_come_before(hearing: Opener) -> None:
    async with hearing(said(" x")) as fake:
        params = TranscriptionParams(
            timestamps="none", language="en", hotwords="Zeno ", prompt="said <|endoftext|><|de|>before"
        )
        async with fake.fake.llm.transcribe(speech(1), params) as stream:
            await stream.finish()
        ids = np.frombuffer(fake.questions[0].prompt_token_ids, np.int32).tolist()
        assert ids[:-4] == [TOKENS.prev, *tokens_of(" Zeno said before")]  # without its special tokens


async def test_the_end_of_a_long_prompt_counts(hearing: Opener) -> None:
    async with hearing(said(" x")) as fake:
        params = TranscriptionParams(timestamps="none", language="en", prompt="a" * 10_000 + "b" * 10)
        async with fake.fake.llm.transcribe(speech(1), params) as stream:
            await stream.finish()
        ids = np.frombuffer(fake.questions[0].prompt_token_ids, np.int32).tolist()
        assert ids[:-4] == [TOKENS.prev, *tokens_of("a" * 213 + "b" * 10)]


async def test_sampling_parameters_are_handed_on(hearing: Opener) -> None:
    async with hearing(said(" x")) as fake:
        params = TranscriptionParams(
            timestamps="none", language="EN", temperature=0.5, top_p=0.9, top_k=7, seed=3, max_tokens=9
        )
        async with fake.fake.llm.transcribe(speech(1), params) as stream:
            await stream.finish()
        asked = fake.questions[0].params
        assert (asked.temperature, asked.top_p, asked.top_k, asked.seed) == (0.5, 0.9, 7, 3)
        assert asked.max_tokens == 9


async def test_text_is_sought_by_beams_at_temperature_0(hearing: Opener) -> None:
    async with hearing(said(" Tea.", logprob=-2)) as fake:
        params = TranscriptionParams(language="en", temperature=(0, 0.5), length_penalty=0.5)
        async with fake.fake.llm.transcribe(speech(1), params) as stream:
            await stream.finish()
        first, second = fake.text_questions
        assert first.audio.search == SpeechSearch(beam_width=5, length_penalty=0.5)
        assert second.audio.search is None
        for ends_it in ({"beam_width": 1}, {"repetition_penalty": 1.1}):
            plain = attrs.evolve(params, **ends_it)
            async with fake.fake.llm.transcribe(speech(1), plain) as stream:
                await stream.finish()
            assert fake.text_questions[-2].audio.search is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"temperature": 0.5}, "temperature must be 0 for a beam search over audio, got 0.5"),
        ({"logprobs": 3}, "logprobs must be None for a beam search over audio, got 3"),
        ({"presence_penalty": 1}, "presence_penalty must be 0.0 for a beam search over audio, got 1"),
    ],
)
async def test_what_a_search_cannot_heed(hearing: Opener, changes: dict[str, Any], reason: str) -> None:
    async with hearing() as fake:
        prompt = AudioPrompt(bytes(4), [TOKENS.sot], search=SpeechSearch())
        params = attrs.evolve(SamplingParams(temperature=0), **changes)
        with pytest.raises(InvalidRequestError, match=reason):
            await fake.fake.llm.complete(prompt, params)


# Long audio


async def test_windows_are_heard_side_by_side_and_joined_in_order(hearing: Opener) -> None:
    def say(add: Add, index: int) -> Sequence[SampledToken]:
        return said(0.5, f" Part {index}.", 1.5)

    async with hearing(say) as fake:
        audio = speech(100)
        params = TranscriptionParams(language="en", temperature=(0,))
        async with fake.fake.llm.transcribe(audio, params) as stream:
            result = await stream.finish()
        assert result.text == "Part 0. Part 1. Part 2. Part 3."
        heard = b"".join(question.audio.samples for question in fake.text_questions)
        assert heard == audio.samples.tobytes()
        starts = [segment.start for segment in result.segments]
        assert starts[0] == 0.5
        for segment in result.segments:
            assert segment.end - segment.start == pytest.approx(1)
            assert segment.seek == round((segment.start - 0.5) * 100)
        assert [segment.id for segment in result.segments] == [0, 1, 2, 3]


async def test_only_some_windows_are_under_way_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has ended and waits for its turn counts, too."""
    async with (
        open_hearing_llm(tmp_path, monkeypatch, max_num_seqs=3) as fake,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_transcribe, fake)
        await eventually(lambda: len(fake.client.added) == 3)
        first, second, third = fake.client.added
        for add in (second, third):
            fake.client.emit(add, said(" x"), FinishReason.STOP)
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert len(fake.client.added) == 3
        fake.client.emit(first, said(" x"), FinishReason.STOP)
        await eventually(lambda: len(fake.client.added) >= 4)
        nursery.cancel_scope.cancel()


async def test_what_a_window_left_unheard_is_heard_by_itself(hearing: Opener) -> None:
    """Its text ends with two timestamps: the second begins what there was no end for."""

    def say(add: Add, index: int) -> Sequence[SampledToken]:
        return said(0.0, " One.", 4.0, 4.0) if index == 0 else said(0.0, " Two.", 5.0)

    async with hearing(say) as fake:
        async with fake.fake.llm.transcribe(speech(10), TranscriptionParams(language="en")) as stream:
            result = await stream.finish()
        assert [heard_seconds(question) for question in fake.text_questions] == [10, 6]
        assert [(segment.start, segment.end) for segment in result.segments] == [(0, 4), (4, 9)]
        assert result.text == "One. Two."


@pytest.mark.parametrize(
    ("parts", "segments"),
    [
        ((0.0, " a", 1.0, 1.0, " b", 3.0), [(" a", 0, 1), (" b", 1, 3)]),
        ((0.5, " a", 1.0, 1.5, " b"), [(" a", 0.5, 1), (" b", 1.5, 4)]),
        ((" a",), [(" a", 0, 4)]),
        ((0.0, " a", 29.0), [(" a", 0, 4)]),
        ((2.0, " a", 1.0), [(" a", 2, 2)]),
        ((0.0, 0.0), []),
        ((), []),
    ],
)
async def test_segments_lie_between_timestamps(
    hearing: Opener, parts: Sequence[Any], segments: list[tuple[str, float, float]]
) -> None:
    async with hearing(said(*parts)) as fake:
        async with fake.fake.llm.transcribe(speech(4), TranscriptionParams(language="en")) as stream:
            result = await stream.finish()
        assert [(each.text, each.start, each.end) for each in result.segments] == segments
        if segments:
            assert result.segments[0].tokens[0] in {timestamp(0), timestamp(0.5), timestamp(2), ord(" ")}


# What is not good enough


async def test_a_hotter_draw_follows_what_is_repetitive_or_doubtful(hearing: Opener) -> None:
    answers = [said(" no" * 200), said(" maybe", logprob=-1.5), said(" Yes, this."), said(" never asked")]
    params = TranscriptionParams(timestamps="none", language="en")
    async with hearing(lambda _, index: answers[index]) as fake:
        async with fake.fake.llm.transcribe(speech(1), params) as stream:
            result = await stream.finish()
        assert result.text == "Yes, this."
        assert [question.params.temperature for question in fake.text_questions] == [0, 0.2, 0.4]
        assert result.segments[0].temperature == 0.4


async def test_the_likeliest_is_taken_where_none_is_good_enough(hearing: Opener) -> None:
    answers = [said(" no" * 200, logprob=-0.1), *(said(f" {i}", logprob=-2 - i % 2) for i in range(5))]
    params = TranscriptionParams(timestamps="none", language="en", no_speech_threshold=None)
    async with hearing(lambda _, index: answers[index]) as fake:
        async with fake.fake.llm.transcribe(speech(1), params) as stream:
            result = await stream.finish()
        assert (result.text, result.segments[0].temperature) == ("0", 0.2)  # it is not repetitive


async def test_even_repetitive_text_is_better_than_none(hearing: Opener) -> None:
    params = TranscriptionParams(timestamps="none", language="en")
    async with hearing(said(" no" * 100)) as fake:
        async with fake.fake.llm.transcribe(speech(1), params) as stream:
            result = await stream.finish()
        assert result.text == ("no " * 100).strip()
        assert len(fake.text_questions) == 6
        assert result.segments[0].compression_ratio == pytest.approx(300 / 14, rel=0.2)


@pytest.mark.parametrize(("no_speech", "text"), [(0.7, ""), (0.5, "Thank you.")])
async def test_doubtful_text_in_likely_silence_is_none(hearing: Opener, no_speech: float, text: str) -> None:
    params = TranscriptionParams(timestamps="none", language="en", temperature=(0, 0.2))
    async with hearing(said(" Thank you.", logprob=-1.1), no_speech=no_speech) as fake:
        async with fake.fake.llm.transcribe(speech(1), params) as stream:
            result = await stream.finish()
        assert result.text == text
        assert len(fake.text_questions) == (1 if not text else 2)


async def test_segments_say_how_likely_silence_is(hearing: Opener) -> None:
    async with hearing(said(0.0, " Yes.", 1.0), no_speech=0.2) as fake:
        async with fake.fake.llm.transcribe(speech(1), TranscriptionParams(language="en")) as stream:
            result = await stream.finish()
        assert result.segments[0].no_speech_prob == pytest.approx(0.2)
        assert result.text == "Yes."


# Text as it comes


async def test_text_comes_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        open_hearing_llm(tmp_path, monkeypatch) as fake,
        fake.llm.transcribe(speech(40), PLAIN) as stream,
    ):
        with trio.CancelScope() as impatient:  # what is asked for is not lost with the cancellation
            impatient.cancel()
            await anext(stream)
        with trio.move_on_after(0.2):
            await anext(stream)
        await eventually(lambda: len(fake.client.added) == 2)
        first, second = fake.client.added
        for part, text in [(b" Ca", "Ca"), (b"f\xc3", "f"), (b"\xa9", "é")]:
            fake.client.emit(first, [token for byte in part for token in said(byte)[:1]])
            assert (await anext(stream)).text == text
        fake.client.emit(second, said(" and tea."), FinishReason.STOP)
        fake.client.emit(first, said("!"), FinishReason.STOP)
        update = await anext(stream)
        assert update.text == "!"
        assert [segment.text for segment in update.segments] == [" Café!"]
        assert (await anext(stream)).text == " and tea."
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert stream.result.text == "Café! and tea."


# Its end


async def test_leaving_ends_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_hearing_llm(tmp_path, monkeypatch) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_transcribe, fake)
            await eventually(lambda: fake.llm.num_open_requests == 4)
            nursery.cancel_scope.cancel()
        assert fake.llm.num_open_requests == 0
        assert fake.client.aborted == [add.request_id for add in fake.client.added]
        assert fake.llm._transcriber is not None
        assert fake.llm._transcriber.intake.seconds_held == 0
        fake.llm._outputs.admission.check(1)


@pytest.mark.parametrize("timestamps", ["none", "segment"])
async def test_an_abort_by_name_ends_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timestamps: Any
) -> None:
    params = TranscriptionParams(timestamps=timestamps, language="en")
    async with open_hearing_llm(tmp_path, monkeypatch) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_abort_soon, fake)
            with pytest.raises(UnfinishedError) as caught:
                async with fake.llm.transcribe(speech(50), params, request_id="mine") as stream:
                    await stream.finish()
        assert caught.value.reason is FinishReason.ABORT


async def _abort_soon(fake: Any) -> None:
    await eventually(lambda: fake.client.added)
    fake.llm.abort("mine")


async def test_the_engines_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_hearing_llm(tmp_path, monkeypatch) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(_die_soon, fake)
        with pytest.raises(EngineDeadError):
            await _transcribe(fake)


async def _die_soon(fake: Any) -> None:
    await eventually(lambda: fake.client.added)
    fake.client.die()


async def _transcribe(fake: Any) -> None:
    async with fake.llm.transcribe(speech(100), PLAIN) as stream:
        await stream.finish()


async def test_there_may_be_no_room(hearing: Opener) -> None:
    limits = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    async with hearing(said(" x"), engine_args=limits) as fake:
        llm = fake.fake.llm
        async with llm.transcribe(speech(1), PLAIN), llm.transcribe(speech(1), PLAIN):
            with pytest.raises(OverloadedError):
                await llm.transcribe(speech(1), PLAIN).open()
        async with llm.transcribe(speech(1), PLAIN) as stream:
            assert (await stream.finish()).text == "x"


# What is refused


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("task", "sing", "task must be one of transcribe, translate, got 'sing'"),
        ("timestamps", "char", "timestamps must be one of none, segment, word"),
        ("temperature", 3, r"temperature must be a number from 0 to 2, or 1 to 8 of them, got 3"),
        ("temperature", (), "temperature must be"),
        ("temperature", (0, math.nan), "temperature must be"),
        ("max_tokens", 0, "max_tokens must be an integer >= 1"),
        ("prompt", 5, "prompt must be a string"),
        ("top_p", 0, "top_p must be"),
        ("seed", "x", "seed must be"),
        ("beam_width", 6, "beam_width must be an integer from 1 to 5"),
        ("length_penalty", math.inf, "length_penalty must be a number from -10 to 10"),
    ],
)
def test_wrong_parameters(field: str, value: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        TranscriptionParams(**{field: value})
    assert caught.value.parameter == field


def test_zero_alone_stands_for_several_temperatures() -> None:
    assert TranscriptionParams(temperature=0).temperature == (0, 0.2, 0.4, 0.6, 0.8, 1)
    assert TranscriptionParams(temperature=0.3).temperature == (0.3,)
    assert TranscriptionParams(temperature=[0]).temperature == (0,)


async def test_languages_are_the_models_own(hearing: Opener) -> None:
    async with hearing() as fake:
        for language in ("xx", "japanese"):
            with pytest.raises(InvalidRequestError, match="language must be one of de, en, fr") as caught:
                await fake.fake.llm.transcribe(speech(1), TranscriptionParams(language=language)).open()
            assert caught.value.parameter == "language"
        async with fake.fake.llm.transcribe(speech(1), TranscriptionParams(language="German")) as stream:
            assert stream.language == "de"


async def test_what_is_no_audio(hearing: Opener, tmp_path: Path) -> None:
    async with hearing(said(" x")) as fake:
        llm = fake.fake.llm
        for audio, reason in [
            (b"text", "file must be WAV"),
            (tmp_path / "missing.wav", "audio cannot be read: .*missing.wav"),
            (5, "audio must be Speech, the bytes of a file, or a path, got 5"),
            (Speech.from_samples([]), "audio must be more than 0"),
        ]:
            with pytest.raises(InvalidRequestError, match=reason):
                await llm.transcribe(audio, PLAIN).open()
        path = tmp_path / "clip.wav"
        path.write_bytes(wav(bytes(32_000)))
        for good in (path, str(path), path.read_bytes()):
            async with llm.transcribe(good, PLAIN) as stream:
                assert (await stream.finish()).text == "x"
        with pytest.raises(InvalidRequestError, match="at most 100 bytes"):
            await llm.transcribe(path, PLAIN, limits=AudioLimits(max_bytes=100)).open()


async def test_a_model_of_text_hears_nothing(fake: Any) -> None:
    with pytest.raises(InvalidRequestError, match="transcription"):
        fake.llm.transcribe(speech(1))


# Words


async def test_words_have_the_times_of_their_tokens(hearing: Opener) -> None:
    text = ' Hi, "caf\u00e9" (no).'
    async with hearing(said(0.0, text, 4.0)) as fake:
        count = len(text.encode())
        fake.fake.client.answers["align_audio"] = [index / 10 for index in range(count + 1)]
        params = TranscriptionParams(language="en", timestamps="word")
        async with fake.fake.llm.transcribe(speech(4), params) as stream:
            result = await stream.finish()
        [(_, _, _, token_ids, num_prompt_tokens)] = [
            call for call in fake.fake.client.calls if call[0] == "align_audio"
        ]
        start = [TOKENS.sot, TOKENS.languages["en"], TOKENS.transcribe, TOKENS.no_timestamps]
        assert token_ids == [*start, *text.encode()]
        assert num_prompt_tokens == 3
        assert [(word.word, word.start, word.end) for word in result.words] == [
            ("Hi,", 0.0, pytest.approx(0.3)),
            ('"caf\u00e9"', pytest.approx(0.4), pytest.approx(1.1)),
            ("(no).", pytest.approx(1.2), pytest.approx(1.6)),
        ]


def test_languages_without_spaces_have_a_word_per_character() -> None:
    from byte_tokenizer import byte_tokenizer

    token_ids = list("你好。".encode())
    times = [index / 10 for index in range(len(token_ids) + 1)]
    words = find_words(token_ids, times, byte_tokenizer(), language="zh")
    assert [(word.word, word.start, word.end) for word in words] == [
        ("你", 0.0, pytest.approx(0.3)),
        ("好。", pytest.approx(0.3), pytest.approx(0.6)),
    ]


async def test_silence_has_no_words(hearing: Opener) -> None:
    async with hearing(said()) as fake:
        params = TranscriptionParams(language="en", timestamps="word")
        async with fake.fake.llm.transcribe(speech(4), params) as stream:
            assert not (await stream.finish()).words
