"""/v1/audio/transcriptions and /v1/audio/translations, over a scripted engine."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from helpers_api import Client, Exchange, FakeLLM, Reply
from helpers_audio import form, wav
from helpers_speech import TOKENS, FakeHearing, eventually, open_hearing_llm, said
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from trioserve.link.messages import Add
    from trioserve.worker.batch import SampledToken

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
CLIP = wav(bytes(2 * 64_000))  # four seconds

Opener = Any


@pytest.fixture
def hearing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Opens an engine that hears, and an application over it."""

    @asynccontextmanager
    async def open_hearing(
        text: Callable[[Add, int], Sequence[SampledToken]] | Sequence[SampledToken] = (),
        *,
        server_args: ServerArgs | None = None,
        **answers: Any,
    ) -> AsyncIterator[tuple[Any, FakeHearing]]:
        async with open_hearing_llm(tmp_path, monkeypatch) as fake:
            say = text if callable(text) else lambda _add, _index: text
            found = FakeHearing(fake, say, **answers)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(found.answer)
                yield Client(fake.llm, server_args), found  # type: ignore[arg-type]
                nursery.cancel_scope.cancel()

    return open_hearing


async def send(client: Any, path: str = TRANSCRIPTIONS, file: bytes | None = CLIP, **fields: Any) -> Reply:
    body, headers = form(file, **fields)
    reply: Reply = await client.call("POST", path, body, headers)
    return reply


async def test_json(hearing: Opener) -> None:
    async with hearing(said(" Hello.")) as (client, found):
        reply = await send(client, model="fake", language="en", prompt="Before.", temperature="0")
        assert reply.status == 200
        assert reply.json == {"text": "Hello.", "usage": {"type": "duration", "seconds": 4}}
        assert reply.headers["x-request-id"]
        [question] = found.text_questions
        assert question.params.extra_args == {"timestamps": False}
        translated = await send(client, TRANSLATIONS)
        assert translated.json == {"text": "Hello."}
        assert found.fake.llm.num_open_requests == 0


@pytest.mark.parametrize(
    ("response_format", "content_type", "body"),
    [
        ("text", "text/plain", "One & two. Three.\n"),
        (
            "srt",
            "application/x-subrip",
            "1\n00:00:00,500 --> 00:00:01,000\nOne & two.\n\n2\n00:00:01,000 --> 00:00:04,000\nThree.\n\n",
        ),
        (
            "vtt",
            "text/vtt",
            "WEBVTT\n\n00:00:00.500 --> 00:00:01.000\nOne &amp; two.\n\n"
            "00:00:01.000 --> 00:00:04.000\nThree.\n\n",
        ),
    ],
)
async def test_texts(hearing: Opener, response_format: str, content_type: str, body: str) -> None:
    async with hearing(said(0.5, " One & two.", 1.0, 1.0, " Three.")) as (client, _):
        reply = await send(client, response_format=response_format, language="en")
        assert reply.headers["content-type"] == f"{content_type}; charset=utf-8"
        assert reply.body.decode() == body


async def test_verbose_json(hearing: Opener) -> None:
    async with hearing(said(0.0, " Ja.", 1.5), language="de", no_speech=0.125) as (client, _):
        reply = await send(client, response_format="verbose_json")
        answer = reply.json
        [segment] = answer.pop("segments")
        assert answer == {
            "task": "transcribe",
            "language": "german",
            "duration": 4.0,
            "text": "Ja.",
            "usage": {"type": "duration", "seconds": 4},
        }
        assert segment.pop("no_speech_prob") == pytest.approx(0.125)
        assert segment.pop("compression_ratio") == pytest.approx(4 / 12)
        assert segment == {
            "id": 0,
            "seek": 0,
            "start": 0.0,
            "end": 1.5,
            "text": " Ja.",
            "tokens": [TOKENS.timestamp_begin, *b" Ja.", TOKENS.timestamp_begin + 75],
            "temperature": 0.0,
            "avg_logprob": -0.25,
        }
        translated = await send(client, TRANSLATIONS, response_format="verbose_json", language="de")
        assert (translated.json["task"], translated.json["language"]) == ("translate", "english")


async def test_a_stream_has_openais_events(hearing: Opener) -> None:
    async with hearing(said(" Hi.")) as (client, found):
        reply = await send(client, stream="true", language="en", temperature="0")
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        *deltas, done, end = reply.events
        assert {event["type"] for event in deltas} == {"transcript.text.delta"}
        assert "".join(event["delta"] for event in deltas) == "Hi."
        usage = {
            "type": "tokens",
            "input_tokens": 204,
            "input_token_details": {"text_tokens": 4, "audio_tokens": 200},
            "output_tokens": 5,
            "total_tokens": 209,
        }
        assert done == {"type": "transcript.text.done", "text": "Hi.", "usage": usage}
        assert end == "[DONE]"
        assert found.text_questions[0].params.output_kind == 1


async def test_an_error_ends_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_hearing_llm(tmp_path, monkeypatch) as fake, trio.open_nursery() as nursery:
        body, headers = form(CLIP, stream="true", language="en")
        exchange = Exchange(Client(fake.llm).app, "POST", TRANSCRIPTIONS, body, headers)  # type: ignore[arg-type]
        nursery.start_soon(exchange.run)
        await eventually(lambda: fake.client.added)
        fake.client.emit(fake.client.added[0], b" Hel")
        await eventually(lambda: b"Hel" in exchange.received)
        fake.client.die()
        await eventually(lambda: b"DONE" in exchange.received)
        exchange.leave()
    delta, error, end = exchange.reply.events
    assert delta == {"type": "transcript.text.delta", "delta": "Hel"}
    assert error["error"]["code"] == "engine_dead"
    assert end == "[DONE]"


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_client_that_leaves_ends_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    async with open_hearing_llm(tmp_path, monkeypatch) as fake, trio.open_nursery() as nursery:
        body, headers = form(wav(bytes(2 * 16_000 * 100)), stream=stream, language="en")
        exchange = Exchange(Client(fake.llm).app, "POST", TRANSCRIPTIONS, body, headers)  # type: ignore[arg-type]
        nursery.start_soon(exchange.run)
        await eventually(lambda: fake.llm.num_open_requests == 4)
        fake.client.emit(fake.client.added[0], b" Hel")
        await trio.testing.wait_all_tasks_blocked(0.02)
        exchange.leave()
        await eventually(lambda: fake.llm.num_open_requests == 0)
        assert fake.client.aborted == [add.request_id for add in fake.client.added]
        assert fake.llm._transcriber.intake.seconds_held == 0  # type: ignore[union-attr]


async def test_an_abort_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_hearing_llm(tmp_path, monkeypatch) as fake, trio.open_nursery() as nursery:
        body, headers = form(CLIP, language="en", request_id="mine")
        exchange = Exchange(Client(fake.llm).app, "POST", TRANSCRIPTIONS, body, headers)  # type: ignore[arg-type]
        nursery.start_soon(exchange.run)
        await eventually(lambda: fake.client.added)
        fake.llm.abort("transcription-mine")
        await eventually(lambda: exchange.received)
        exchange.leave()
    assert (exchange.reply.status, exchange.reply.error["code"]) == (503, "aborted")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"language": "xx"}, "language", "language must be one of de, en, fr, got 'xx'."),
        ({"response_format": "xml"}, "response_format", "response_format must be one of 'json', 'text'"),
        ({"temperature": "hot"}, "temperature", "temperature must be a number, got 'hot'"),
        ({"temperature": "3"}, "temperature", "temperature must be a number from 0 to 2, got 3.0"),
        ({"stream": "yes"}, "stream", "stream must be true or false, got 'yes'"),
        ({"top_k": "1.5"}, "top_k", "top_k must be an integer, got '1.5'"),
        ({"n": "2"}, "n", "n must be 1 or null, got 2"),
        ({"beam_width": "6"}, "beam_width", "beam_width must be an integer from 1 to 5, got 6"),
        ({"use_beam_search": "false", "beam_width": "3"}, "beam_width",
         "beam_width must be 1 or null without use_beam_search, got 3"),
        ({"include[]": "logprobs"}, "include", "include must be null or empty"),
        ({"to_language": "de"}, "to_language", "to_language must be null or empty, got 'de'"),
        ({"max_completion_tokens": "0"}, "max_completion_tokens", "max_completion_tokens must be"),
        ({"timestamp_granularities[]": "hour", "response_format": "verbose_json"},
         "timestamp_granularities[0]", "must be one of 'word', 'segment', got 'hour'"),
        ({"timestamp_granularities[]": ["word", "segment"]}, "timestamp_granularities",
         "must be empty unless response_format is verbose_json, got word, segment with json"),
        ({"stream": "true", "response_format": "srt"}, "response_format", "must be json or text with stream"),
        ({"language": ["en", "de"]}, "language", "language must be a string, got ['en', 'de']"),
    ],
)  # fmt: skip
async def test_wrong_fields(hearing: Opener, fields: dict[str, Any], param: str, message: str) -> None:
    async with hearing() as (client, found):
        reply = await send(client, **fields)
        assert reply.status == 400
        assert reply.error["param"] == param
        assert message in reply.error["message"]
        assert not found.fake.client.added


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({}, 5),
        ({"use_beam_search": "true", "beam_width": "3"}, 3),
        ({"use_beam_search": "false"}, None),
        ({"stream": "true"}, None),
        ({"stream": "true", "use_beam_search": "true"}, 5),
    ],
)
async def test_texts_that_are_followed_side_by_side(
    hearing: Opener, fields: dict[str, str], width: int | None
) -> None:
    async with hearing(said(" Tea.")) as (client, found):
        assert (await send(client, **fields)).status == 200
        search = found.text_questions[0].audio.search
        assert (None if search is None else search.beam_width) == width


async def test_wrong_files(hearing: Opener) -> None:
    three_hours = wav(bytes(10), claims=3 * 3600 * 32_000)
    async with hearing(server_args=ServerArgs(max_audio_size=2**18)) as (client, _):
        for file, status, message in [
            (b"This is no audio.", 400, "file must be WAV"),
            (b"", 400, "an empty one"),
            (three_hours, 400, "at most 7200 s long, got 10800.0 s by its header"),
            (bytes(2**18 + 1), 413, f"file must be at most {2**18} bytes"),
            (bytes(2**20), 413, f"larger than {2**18 + 2**18} bytes"),
        ]:
            reply = await send(client, file=file)
            assert (reply.status, message in reply.error["message"]) == (status, True), reply.error
        assert reply.error["param"] is None
        missing = await send(client, file=None)
        assert "file must be an audio file, got none" in missing.error["message"]
        part = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nno file\r\n--x--'
        headers = {"content-type": "multipart/form-data; boundary=x"}
        reply = await client.call("POST", TRANSCRIPTIONS, part, headers)
        assert "got a plain value, without a file name" in reply.error["message"]
        assert reply.error["param"] == "file"


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (b"{}", "application/json", "must be multipart/form-data, got 'application/json'"),
        (b"", "multipart/form-data", "must have a boundary"),
        (b"nonsense", "multipart/form-data; boundary=x", "no valid form"),
        (b"--x\r\nbad\r\n\r\n1\r\n--x--", "multipart/form-data; boundary=x", "no valid form"),
        (b"--x\r\nContent-Disposition: form-data\r\n\r\n1\r\n--x--", "multipart/form-data; boundary=x",
         "must have a name"),
        (b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xff\r\n--x--',
         "multipart/form-data; boundary=x", "a must be UTF-8"),
        (b'--x\r\nContent-Disposition: form-data; name="a"; filename="a"\r\n\r\n1\r\n' * 2 + b"--x--",
         "multipart/form-data; boundary=x", "a must be one file, got several"),
        (b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + bytes(2**19) + b"\r\n--x--",
         "multipart/form-data; boundary=x", "at most 262144 bytes"),
    ],
)  # fmt: skip
async def test_what_is_no_form(hearing: Opener, body: bytes, content_type: str, message: str) -> None:
    async with hearing() as (client, _):
        reply = await client.call("POST", TRANSCRIPTIONS, body, {"content-type": content_type})
        assert reply.status == 400
        assert message in reply.error["message"]


async def test_many_parts_are_too_many(hearing: Opener) -> None:
    async with hearing() as (client, _):
        part = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
        headers = {"content-type": "multipart/form-data; boundary=x"}
        reply = await client.call("POST", TRANSCRIPTIONS, part * 100 + b"--x--", headers)
        assert reply.status == 413


async def test_a_body_that_does_not_come(hearing: Opener) -> None:
    async with hearing(server_args=ServerArgs(body_timeout=0.05)) as (client, _):
        headers = {"content-type": "multipart/form-data; boundary=x"}
        exchange = Exchange(client.app, "POST", TRANSCRIPTIONS, None, headers)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.run)
            await trio.sleep(0.1)
            exchange.leave()
        assert exchange.reply.status == 408


async def test_a_model_that_does_not_hear() -> None:
    reply = await send(Client(FakeLLM()))
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert "The tasks are of 'small' generate" in reply.error["message"]


async def test_a_model_that_there_is_not(hearing: Opener) -> None:
    async with hearing() as (client, _):
        reply = await send(client, model="other")
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def test_audio_is_counted(hearing: Opener) -> None:
    async with hearing(said(" x")) as (client, _):
        await send(client)
        metrics = (await client.get("/metrics")).body.decode()
        assert re.search(r"^trioserve:audio_seconds_total{.*} 4\.0$", metrics, re.MULTILINE)


async def test_a_text_with_keywords(hearing: Opener) -> None:
    async with hearing(said(" x")) as (client, found):
        await send(client, language="en", hotwords="Ann", **{"keywords[]": ["Bo", "Cy"]})
        assert found.text_questions[0].prompt_token_ids.count(ord("B").to_bytes(4, "little")) == 1
        assert found.text_questions[0].params.max_tokens == 448 - 4 - len(" Ann Bo Cy") - 1


async def test_an_answer_that_ran_out_of_room_is_one(hearing: Opener) -> None:
    async with hearing(said(" too long")[:-1]) as (client, _):
        assert (await send(client, language="en")).json["text"] == "too long"
