"""Transcriptions."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from endpoint import Endpoint

SPOKEN = Path(__file__).parents[2] / "data" / "speech"
TEXTS = json.loads((SPOKEN / "transformers.json").read_text())["texts"]
FILES = [SPOKEN / f"english-{number}.ogg" for number in range(len(TEXTS))]


@pytest.fixture
def client(speech: Endpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=speech.api, api_key=speech.key, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def test_json(client: openai.OpenAI, speech: Endpoint) -> None:
    heard = client.audio.transcriptions.create(model=speech.model, file=FILES[0], language="en")
    assert heard.text == TEXTS[0]
    assert heard.usage is not None
    assert heard.usage.type == "duration"


def test_segments_and_words(client: openai.OpenAI, speech: Endpoint) -> None:
    heard = client.audio.transcriptions.create(
        model=speech.model,
        file=FILES[0],
        response_format="verbose_json",
        timestamp_granularities=["segment", "word"],
    )
    assert heard.segments is not None
    assert "".join(segment.text for segment in heard.segments).strip() == heard.text == TEXTS[0]
    assert heard.words is not None
    assert [word.word for word in heard.words] == TEXTS[0].split()
    assert 0 < heard.words[-1].end <= heard.duration


@pytest.mark.parametrize(
    ("form", "begins"), [("text", "The quick"), ("srt", "1\n00:00:00,"), ("vtt", "WEBVTT\n\n00:00")]
)
def test_texts(client: openai.OpenAI, speech: Endpoint, form: str, begins: str) -> None:
    heard = client.audio.transcriptions.create(model=speech.model, file=FILES[0], response_format=form)
    assert isinstance(heard, str)
    assert heard.startswith(begins)


def test_stream(client: openai.OpenAI, speech: Endpoint) -> None:
    with client.audio.transcriptions.create(model=speech.model, file=FILES[3], stream=True) as stream:
        *deltas, done = stream
    assert [delta.type for delta in deltas] == ["transcript.text.delta"] * len(deltas)
    assert "".join(delta.delta for delta in deltas) == done.text == TEXTS[3]


def test_many_at_a_time(speech: Endpoint) -> None:
    async def hear() -> list[str]:
        async with openai.AsyncOpenAI(base_url=speech.api, api_key=speech.key, max_retries=0) as client:
            ask = partial(
                client.audio.transcriptions.create, model=speech.model, response_format="verbose_json"
            )
            return [heard.text for heard in await asyncio.gather(*(ask(file=file) for file in FILES))]

    assert asyncio.run(hear()) == TEXTS


def test_errors(client: openai.OpenAI, speech: Endpoint) -> None:
    with pytest.raises(openai.BadRequestError, match="file must be WAV") as caught:
        client.audio.transcriptions.create(model=speech.model, file=("talk.mp3", b"These are words. " * 99))
    assert caught.value.param == "file"
    with (
        pytest.raises(openai.BadRequestError, match="knows English alone"),
        pytest.warns(DeprecationWarning, match="deprecated"),
    ):
        client.audio.translations.create(model=speech.model, file=FILES[0])
