"""Whisper behind a real server, for OpenAI's client; and offline."""

from __future__ import annotations

import io
import json
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import openai
import pytest

from helpers_audio import encode, wav
from helpers_speech import BECKETT, BECKETT_GREEDY, beckett
from served import ServedModel, served, wait_for
from trioserve import LLM, Speech, TranscriptionParams
from trioserve.audio.decoding import decode_audio
from trioserve.audio.limits import AudioLimits

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "whisper-tiny.en"
SPOKEN = Path(__file__).parent / "data" / "speech"
"""By espeak-ng; and what transformers hears."""


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    with served(tmp_path_factory.mktemp("whisper"), ["--model", MODEL, "--dtype", "float32"]) as running:
        yield running
        running.wait_until_idle()
        assert running.terminate() == 0, running.log
        assert "Traceback" not in running.log, running.log


@pytest.fixture
def client(whisper: ServedModel) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{whisper.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def clip() -> bytes:
    return beckett()


def test_every_form_of_an_answer(client: openai.OpenAI, clip: bytes) -> None:
    file = ("clip.wav", clip)
    plain = client.audio.transcriptions.create(file=file, model=MODEL)
    assert plain.text == BECKETT
    assert plain.usage is not None
    assert plain.usage.model_dump() == {"type": "duration", "seconds": 10}
    text = client.audio.transcriptions.create(file=file, model=MODEL, response_format="text")
    assert text == BECKETT + "\n"
    verbose = client.audio.transcriptions.create(
        file=file, model=MODEL, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (verbose.text, verbose.language) == (BECKETT, "english")
    assert verbose.duration == pytest.approx(9.96, abs=0.01)
    assert verbose.segments is not None
    assert "".join(segment.text for segment in verbose.segments).strip() == BECKETT
    assert verbose.segments[0].no_speech_prob < 0.5
    subtitles = client.audio.transcriptions.create(file=file, model=MODEL, response_format="srt")
    assert re.match(r"1\n00:00:0\d,\d{3} --> 00:00:0\d,\d{3}\nEver tried", subtitles)


def test_a_stream_for_the_client(client: openai.OpenAI, clip: bytes) -> None:
    stream = client.audio.transcriptions.create(file=("clip.wav", clip), model=MODEL, stream=True)
    events = list(stream)
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == BECKETT_GREEDY
    [done] = [event for event in events if event.type == "transcript.text.done"]
    assert done.text == BECKETT_GREEDY
    assert done.usage is not None
    assert done.usage.total_tokens > 500


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [("flac", "flac", 44_100), ("mp3", "libmp3lame", 44_100), ("webm", "libopus", 48_000)],
)
def test_other_files(client: openai.OpenAI, clip: bytes, container: str, codec: str, rate: int) -> None:
    samples = decode_audio(clip, AudioLimits()).samples
    times = np.arange(int(len(samples) * rate / 16_000)) * 16_000 / rate
    resampled = np.interp(times, np.arange(len(samples)), samples).astype(np.float32)
    file = encode(np.stack([resampled, resampled]), container, codec, rate=rate)
    assert client.audio.transcriptions.create(file=("clip", file), model=MODEL).text == BECKETT


def test_long_audio_is_heard_in_windows(client: openai.OpenAI, clip: bytes) -> None:
    samples = decode_audio(clip, AudioLimits()).samples
    pause = np.zeros(22 * 16_000, np.float32)
    long = np.concatenate([samples, pause, samples])  # 42 seconds
    file = wav((long * 32_767).astype("<i2").tobytes())
    found = client.audio.transcriptions.create(
        file=("long.wav", file), model=MODEL, response_format="verbose_json"
    )
    assert found.text.lower().count("fail better") == 2
    assert found.segments is not None
    starts = [segment.start for segment in found.segments]
    assert starts == sorted(starts)
    assert starts[-1] > 25
    assert 38 < found.segments[-1].end < 42.1
    assert {segment.seek for segment in found.segments} != {0}


def test_wrong_audio_is_a_400(client: openai.OpenAI) -> None:
    for file in (b"no audio", wav(bytes(10), claims=3 * 3600 * 32_000)):
        with pytest.raises(openai.BadRequestError) as caught:
            client.audio.transcriptions.create(file=("x.wav", io.BytesIO(file)), model=MODEL)
        assert caught.value.param == "file"
    with pytest.raises(openai.BadRequestError, match="language must be one of en, got 'de'"):
        client.audio.transcriptions.create(file=("x.wav", wav(bytes(32_000))), model=MODEL, language="de")
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(openai.BadRequestError, match="translate"),
    ):
        client.audio.translations.create(file=("x.wav", wav(bytes(32_000))), model=MODEL)


def test_a_model_that_hears_generates_no_text(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="transcription"):
        client.completions.create(model=MODEL, prompt="Hello")


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_a_client_that_leaves_frees_everything(whisper: ServedModel, clip: bytes, share: float) -> None:
    """During the upload, and while its audio is heard."""
    body = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + clip + b"\r\n--x--\r\n"
    )
    head = (
        f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", whisper.port)) as connection:
        connection.sendall(head.encode() + body[: int(len(body) * share)])
        wait_for(lambda: whisper.request("GET", "/load")[1] == {"server_load": 1})
        time.sleep(0.05)
    wait_for(lambda: whisper.request("GET", "/load")[1] == {"server_load": 0})
    whisper.wait_until_idle()


def test_offline(clip: bytes, tmp_path: Path) -> None:
    path = tmp_path / "clip.wav"
    path.write_bytes(clip)
    speech = decode_audio(clip, AudioLimits())
    with LLM(model=MODEL, dtype="float32", threads=1) as llm:
        params = TranscriptionParams(timestamps="none")
        results = llm.transcribe([path, str(path), clip, speech], params, use_tqdm=False)
        assert [result.text for result in results] == [BECKETT] * 4
        assert llm.transcribe(Speech.from_samples([0.0] * 16_000), params, use_tqdm=False)[0].duration == 1
        with pytest.raises(ValueError, match="file must be WAV"):
            llm.transcribe([clip, b"no audio"], use_tqdm=False)
        assert llm.transcribe(clip, use_tqdm=False)[0].segments


def test_words_have_times(client: openai.OpenAI, clip: bytes) -> None:
    found = client.audio.transcriptions.create(
        file=("clip.wav", clip),
        model=MODEL,
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    assert found.words is not None
    assert " ".join(word.word for word in found.words) == BECKETT
    times = [time for word in found.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert found.segments is None
    (ever, *_, better) = found.words
    assert ever.start < 1.5
    assert 7.5 < better.start < better.end < 9.97


def test_spoken_sentences_are_heard_as_by_transformers(client: openai.OpenAI) -> None:
    """Ten, by espeak-ng, in OGG: the texts, and where they end."""
    expected = json.loads((SPOKEN / "transformers.json").read_text())
    for number, (text, ends) in enumerate(zip(expected["texts"], expected["segment_ends"], strict=True)):
        file = SPOKEN / f"english-{number}.ogg"
        heard = client.audio.transcriptions.create(file=file, model=MODEL, response_format="verbose_json")
        assert heard.text == text
        assert heard.segments is not None
        assert [segment.end for segment in heard.segments] == pytest.approx(ends, abs=0.1)


def test_other_languages() -> None:
    """The language is found, and translated from."""
    with LLM(model="whisper-base", dtype="float32", threads=2) as llm:
        (found,) = llm.transcribe(SPOKEN / "spanish.ogg", use_tqdm=False)
        words = " ".join(re.findall(r"\w+", found.text.lower()))
        assert found.language == "es"
        assert words == "buenos días mi hermana vive en una casa pequeña cerca del mar"
        params = TranscriptionParams(task="translate")
        (found,) = llm.transcribe(SPOKEN / "spanish.ogg", params, use_tqdm=False)
        assert found.text.endswith("lives in a small house near the sea.")  # as by transformers
