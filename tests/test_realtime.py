"""WS /v1/realtime over a scripted engine: what is told of what is said, and who ends what."""

from __future__ import annotations

import base64
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing

from helpers_http import DEADLINE, Server, serving
from helpers_speech import TOKENS, FakeHearing, open_hearing_llm, said
from helpers_websocket import CLOSE, WebsocketClient, frame, handshake, open_websocket
from trioserve import ServerArgs
from trioserve.outputs import FinishReason
from trioserve.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from trioserve.link.messages import Add
    from trioserve.worker.batch import SampledToken

MODEL = "speech"


def pcm(*parts: float, rate: int = 16_000) -> bytes:
    """Seconds of noise, of silence, of noise, ..."""
    noise = np.random.default_rng(0)
    samples = [
        noise.uniform(-0.5, 0.5, round(part * rate)) if n % 2 == 0 else np.zeros(round(part * rate))
        for n, part in enumerate(parts)
    ]
    return (np.concatenate(samples) * 2**15).astype("<i2").tobytes()


def tokens_of(question: Add) -> list[int]:
    return np.frombuffer(question.prompt_token_ids, np.int32).tolist()


def text_of(question: Add) -> bytes:
    return bytes(token for token in tokens_of(question) if token < 256)


def numbered(_: object, index: int) -> Sequence[SampledToken]:
    return said(f" word{index}")


@attrs.define
class Session:
    websocket: WebsocketClient
    hearing: FakeHearing

    async def say(self, kind: str, **fields: Any) -> None:
        await self.websocket.text(json.dumps({"type": kind, **fields}))

    async def append(self, data: bytes) -> None:
        await self.say("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    async def commit(self, **fields: Any) -> None:
        await self.say("input_audio_buffer.commit", **fields)

    async def sync(self) -> None:
        """Until all that was said has been taken."""
        await self.say("unknown")
        assert "unknown_event" in str(await self.heard())

    async def heard(self) -> dict[str, Any]:
        return json.loads(await self.websocket.message())


@attrs.define
class World:
    server: Server
    hearing: FakeHearing

    async def open(self, query: str = "", *, model: str | None = MODEL) -> Session:
        websocket = await open_websocket(self.server, f"/v1/realtime{query}")
        session = Session(websocket, self.hearing)
        assert (await session.heard())["type"] == "session.created"
        if model is not None:
            await session.say("session.update", model=model)
        return session


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    @asynccontextmanager
    async def open_world(
        *, answers: bool = True, keep_alive_timeout: float = 30.0, **options: Any
    ) -> AsyncIterator[World]:
        async with open_hearing_llm(tmp_path, monkeypatch, served_model_name=MODEL) as fake:
            hearing = FakeHearing(fake, numbered)
            app = create_app(fake.llm, ServerArgs(**options))
            async with (
                serving(app, keep_alive_timeout=keep_alive_timeout) as server,
                trio.open_nursery() as nursery,
            ):
                if answers:
                    nursery.start_soon(hearing.answer)
                yield World(server, hearing)
                nursery.cancel_scope.cancel()

    return open_world


# vLLM's events


async def test_text_comes_while_audio_comes(world: Any) -> None:
    async with world() as opened:
        session = await opened.open()
        await session.commit()  # vLLM's clients begin with one; there is nothing to hear yet
        await session.append(pcm(4.5, 0.6, 1.0))
        assert await session.heard() == {"type": "transcription.delta", "delta": "word0"}
        await session.append(pcm(3.5, 1.0))
        assert await session.heard() == {"type": "transcription.delta", "delta": " word1"}
        await session.append(pcm(0.5))
        await session.commit()
        assert await session.heard() == {"type": "transcription.delta", "delta": " word2"}
        await session.commit(final=True)
        done = await session.heard()
        assert (done["type"], done["text"]) == ("transcription.done", "word0 word1 word2")
        usage = done["usage"]
        assert usage["completion_tokens"] == 3 * len(said(" word0"))
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        seconds = [len(add.audio.samples) / 64_000 for add in opened.hearing.text_questions]
        assert sum(seconds) == pytest.approx(4.5 + 0.6 + 1.0 + 3.5 + 1.0 + 0.5)


async def test_one_utterance_after_the_other(world: Any) -> None:
    async with world() as opened:
        session = await opened.open()
        for n in range(2):
            await session.append(pcm(0.5))
            await session.commit(final=True)
            assert (await session.heard())["delta"] == f"word{n}"
            assert (await session.heard())["text"] == f"word{n}"


async def test_silence_is_not_heard(world: Any) -> None:
    async with world() as opened:
        session = await opened.open()
        await session.append(pcm(0, 40.0))
        await session.commit(final=True)
        assert (await session.heard())["text"] == ""
        assert opened.hearing.questions == []


async def test_long_audio_in_one_event(world: Any) -> None:
    async with world() as opened:
        session = await opened.open()
        await session.append(pcm(100.0))
        await session.commit(final=True)
        texts = []
        while (event := await session.heard())["type"] == "transcription.delta":
            texts.append(event["delta"])
        assert "".join(texts) == event["text"] == "word0 word1 word2 word3"


async def test_language_and_prompt(world: Any) -> None:
    async with world() as opened:
        session = await opened.open()
        await session.say("session.update", model=MODEL, language="de", prompt="Guten Tag")
        await session.append(pcm(0.5))
        await session.commit(final=True)
        await session.heard()
        [question] = opened.hearing.questions
        assert TOKENS.languages["de"] in tokens_of(question)
        assert text_of(question) == b" Guten Tag"


async def test_a_language_is_found_once(world: Any) -> None:
    async with world() as opened:
        session = await opened.open()
        for _ in range(3):
            await session.append(pcm(0.5))
            await session.commit()
            await session.heard()
        assert len(opened.hearing.questions) == 4
        assert len(opened.hearing.text_questions) == 3


WRONG = [
    ("no json", "invalid_json"),
    ('{"type": "session.update"', "invalid_json"),
    ("[" * 1000 + "]" * 1000, "invalid_json"),
    ("[]", "invalid_event"),
    ('{"model": "x"}', "invalid_event"),
    ('{"type": 5}', "invalid_event"),
    ('{"type": "session.update"}', "invalid_event"),
    ('{"type": "session.update", "model": 5}', "invalid_event"),
    ('{"type": "session.update", "model": "speech", "language": "tlh"}', "invalid_event"),
    ('{"type": "session.update", "session": {"type": "realtime"}}', "invalid_event"),
    ('{"type": "input_audio_buffer.append"}', "invalid_event"),
    ('{"type": "input_audio_buffer.commit", "final": "yes"}', "invalid_event"),
    ('{"type": "response.create"}', "unknown_event"),
    ('{"type": "session.update", "model": "nobody"}', "model_not_found"),
    ('{"type": "input_audio_buffer.append", "audio": "****"}', "invalid_audio"),
    ('{"type": "input_audio_buffer.append", "audio": "AAA"}', "invalid_audio"),
    ('{"type": "input_audio_buffer.append", "audio": "AAAA"}', "invalid_audio"),
    ('{"type": "input_audio_buffer.append", "audio": ""}', "invalid_audio"),
    ('{"type": "input_audio_buffer.append", "audio": "\\u00fc"}', "invalid_audio"),
]


async def test_what_is_wrong_is_told_and_the_session_goes_on(world: Any) -> None:
    async with world() as opened:
        session = await opened.open()
        for text, code in WRONG:
            await session.websocket.text(text)
            event = await session.heard()
            assert (event["type"], event["code"]) == ("error", code), text
            assert len(event["error"]) > 10
        await session.websocket.send(frame(2, b"binary"))
        assert (await session.heard())["code"] == "invalid_event"
        await session.append(pcm(0.5))
        await session.commit(final=True)
        assert (await session.heard())["delta"] == "word0"


@pytest.mark.parametrize("kind", ["append", "commit"])
async def test_the_model_comes_first(world: Any, kind: str) -> None:
    async with world() as opened:
        session = await opened.open(model=None)
        await session.say(f"input_audio_buffer.{kind}", audio="AAAA")
        assert (await session.heard())["code"] == "model_not_validated"


# OpenAI's events


async def test_openais_events(world: Any) -> None:
    async with world() as opened:
        session = await opened.open("?intent=transcription", model=None)
        transcription = {"model": MODEL, "language": "en", "prompt": "Hi", "keywords": ["trio"]}
        audio = {"input": {"format": {"type": "audio/pcm", "rate": 24000}, "transcription": transcription}}
        await session.say("session.update", session={"type": "transcription", "audio": audio})
        updated = await session.heard()
        assert updated["type"] == "session.updated"
        assert updated["session"]["audio"]["input"]["transcription"] == transcription
        assert updated["session"]["audio"]["input"]["turn_detection"] is None
        await session.append(pcm(0.5, rate=24_000))
        await session.commit()
        committed, delta, completed = [await session.heard() for _ in range(3)]
        assert committed["type"] == "input_audio_buffer.committed"
        assert committed["previous_item_id"] is None
        item_id = committed["item_id"]
        assert (delta["item_id"], delta["delta"]) == (item_id, "word0")
        assert completed["type"] == "conversation.item.input_audio_transcription.completed"
        assert (completed["item_id"], completed["transcript"]) == (item_id, "word0")
        assert completed["usage"] == {"type": "duration", "seconds": 1}
        [question] = opened.hearing.text_questions
        assert len(question.audio.samples) / 4 == pytest.approx(8000, abs=100)
        assert text_of(question) == b" trio Hi"
        await session.append(pcm(0.5, rate=24_000))
        await session.commit()
        assert (await session.heard())["previous_item_id"] == item_id


async def test_a_session_in_an_update_is_openais(world: Any) -> None:
    async with world() as opened:
        session = await opened.open(model=None)
        await session.say("session.update", session={"type": "transcription"})
        assert (await session.heard())["session"]["audio"]["input"]["format"]["rate"] == 24_000
        await session.say("nothing", event_id="mine")
        error = (await session.heard())["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "unknown_event")
        assert (error["param"], error["event_id"]) == ("type", "mine")
        await session.commit()
        assert (await session.heard())["error"]["code"] == "input_audio_buffer_commit_empty"


async def test_the_server_ends_turns(world: Any) -> None:
    """Where it was asked to, and goes on with it when other settings change."""
    async with world() as opened:
        session = await opened.open("?intent=transcription", model=None)
        detection = {"type": "server_vad", "silence_duration_ms": 400, "prefix_padding_ms": 200}
        for settings in ({"turn_detection": detection}, {"transcription": {"language": "en"}}):
            audio = {"input": settings | {"format": {"type": "audio/pcm", "rate": 16_000}}}
            await session.say("session.update", session={"type": "transcription", "audio": audio})
            told = (await session.heard())["session"]["audio"]["input"]["turn_detection"]
            assert told == detection | {"threshold": 0.5}
        await session.append(pcm(0, 1.0, 1.0, 1.0, 0.5, 1.0))
        events = [await session.heard() for _ in range(10)]
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for event in events:
            by_kind.setdefault(event["type"].rpartition(".")[2], []).append(event)
        assert [event["audio_start_ms"] for event in by_kind["speech_started"]] == [800, 2800]
        assert [event["audio_end_ms"] for event in by_kind["speech_stopped"]] == [2400, 3900]
        assert [event["transcript"] for event in by_kind["completed"]] == ["word0", "word1"]
        for kind in by_kind.values():
            assert [event["item_id"] for event in kind] == [
                event["item_id"] for event in by_kind["committed"]
            ]
        seconds = [len(add.audio.samples) / 64_000 for add in opened.hearing.text_questions]
        assert seconds == pytest.approx([1.6, 1.1])
        await session.commit()
        assert (await session.heard())["error"]["code"] == "input_audio_buffer_commit_empty"
        audio = {"input": {"turn_detection": None}}
        await session.say("session.update", session={"type": "transcription", "audio": audio})
        assert (await session.heard())["session"]["audio"]["input"]["turn_detection"] is None
        await session.append(pcm(0.5, 1.0))
        await session.commit()
        assert (await session.heard())["type"] == "input_audio_buffer.committed"


async def test_what_was_said_can_be_taken_back(world: Any) -> None:
    async with world() as opened:
        session = await opened.open("?intent=transcription", model=None)
        await session.append(pcm(1.0))
        await session.say("input_audio_buffer.clear")
        assert (await session.heard())["type"] == "input_audio_buffer.cleared"
        await session.append(pcm(0.5, rate=24_000))
        await session.commit()
        assert [(await session.heard())["type"].rpartition(".")[2] for _ in range(3)] == [
            "committed",
            "delta",
            "completed",
        ]
        [question] = opened.hearing.text_questions
        assert len(question.audio.samples) / 4 == pytest.approx(8000, abs=100)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"turn_detection": {"type": "semantic_vad"}}, "session.audio.input.turn_detection.type"),
        (
            {"turn_detection": {"type": "server_vad", "silence_duration_ms": -1}},
            "session.audio.input.turn_detection.silence_duration_ms",
        ),
        ({"noise_reduction": {"type": "near_field"}}, "session.audio.input.noise_reduction"),
        ({"format": {"type": "audio/pcmu"}}, "session.audio.input.format.type"),
        ({"format": {"type": "audio/pcm", "rate": 7999}}, "session.audio.input.format.rate"),
        ({"transcription": {"language": "tlh"}}, "language"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(world: Any, settings: Any, param: str) -> None:
    async with world() as opened:
        session = await opened.open("?intent=transcription", model=None)
        await session.say("session.update", session={"type": "transcription", "audio": {"input": settings}})
        error = (await session.heard())["error"]
        assert (error["code"], error["param"]) == ("invalid_event", param)


# Its life


async def refused(opened: World, path: str, *headers: str) -> tuple[int, str]:
    reply = await opened.server.ask(handshake(path, *headers))
    return reply.status, reply.error["code"]


async def test_before_the_handshake(world: Any) -> None:
    async with world(api_key="secret", max_concurrent_requests=1) as opened:
        key = "Authorization: Bearer secret"
        assert await refused(opened, "/v1/realtime") == (401, "invalid_api_key")
        path = "/v1/realtime?model=nobody"
        assert await refused(opened, path, key) == (404, "model_not_found")
        origin = "Origin: https://evil.example.com"
        assert await refused(opened, "/v1/realtime", key, origin) == (403, "origin_not_allowed")
        offered = "Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.secret"
        client = await open_websocket(opened.server, "/v1/realtime", offered)
        assert client.head["sec-websocket-protocol"] == "realtime"
        assert client.head["x-request-id"]
        assert await refused(opened, "/v1/realtime", key) == (503, "overloaded")
        client.client.close()
        await trio.testing.wait_all_tasks_blocked()
        await open_websocket(opened.server, "/v1/realtime", offered)


@pytest.mark.parametrize("leaving", ["close", "frame"])
async def test_leaving_ends_what_is_heard(world: Any, leaving: str) -> None:
    async with world(answers=False) as opened:
        session = await opened.open()
        client = opened.hearing.fake.client
        await session.append(pcm(0.5))
        await session.commit(final=True)
        with trio.fail_after(DEADLINE):
            while not client.added:
                await trio.testing.wait_all_tasks_blocked()
        if leaving == "close":
            session.websocket.client.close()
        else:
            await session.websocket.send(frame(CLOSE))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert client.aborted == [client.added[0].request_id]
        metrics = opened.hearing.fake.llm.metrics.render().decode()
        assert 'trioserve:websockets_open{engine="0",model_name="speech"} 0.0' in metrics


async def test_a_failure_ends_its_item_alone(world: Any) -> None:
    async with world(answers=False) as opened:
        client = opened.hearing.fake.client
        session = await opened.open()
        other = await opened.open()
        await session.append(pcm(0.5))
        await session.commit(final=True)
        with trio.fail_after(DEADLINE):
            while not client.added:
                await trio.testing.wait_all_tasks_blocked()
        client.emit(client.added[0], [], FinishReason.ERROR)
        event = await session.heard()
        assert (event["type"], event["code"]) == ("error", "processing_error")
        async with trio.open_nursery() as nursery:
            opened.hearing.questions += client.added
            nursery.start_soon(opened.hearing.answer)
            for one in (session, other):
                await one.append(pcm(0.5))
                await one.commit(final=True)
                assert (await one.heard())["type"] == "transcription.delta"
                assert (await one.heard())["type"] == "transcription.done"
            nursery.cancel_scope.cancel()


async def test_a_client_that_sends_faster_than_it_is_heard_waits(world: Any) -> None:
    async with world(answers=False) as opened:
        session = await opened.open()
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while True:
                await session.append(pcm(10.0))
                sent += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            await trio.testing.wait_all_tasks_blocked(0.3)
            before = sent
            assert before < 60
            nursery.start_soon(opened.hearing.answer)
            while sent < before + 10:
                await session.heard()
            nursery.cancel_scope.cancel()


async def test_a_shutdown_lets_what_was_said_be_heard(world: Any) -> None:
    async with world() as opened:
        idle, busy = await opened.open(), await opened.open()
        await busy.append(pcm(0.5))
        await busy.sync()
        opened.server.shutdown.set()
        assert (await busy.heard())["delta"] == "word0"
        assert (await busy.heard())["text"] == "word0"
        assert await busy.websocket.closing() == (1001, "The server is shutting down.")
        assert (await idle.websocket.closing())[0] == 1001
        for session in idle, busy:
            session.websocket.client.close()
        with trio.fail_after(DEADLINE):
            await opened.server.returned.wait()


async def test_an_idle_session_ends(world: Any) -> None:
    async with world(realtime_idle_timeout=0.05) as opened:
        session = await opened.open()
        assert await session.websocket.closing() == (1000, "The session was idle for too long.")


# A client of others


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
async def test_openais_client(world: Any) -> None:
    """The one of Python, in a thread: as its users write it."""
    import openai

    def talk(port: int) -> list[Any]:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0)
        with client, client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            audio = {"input": {"transcription": {"model": MODEL}, "turn_detection": None}}
            connection.session.update(session={"type": "transcription", "audio": audio})
            data = pcm(0.5, rate=24_000)
            for start in range(0, len(data), 4800):
                piece = base64.b64encode(data[start : start + 4800]).decode()
                connection.input_audio_buffer.append(audio=piece)
            connection.input_audio_buffer.commit()
            events = []
            for event in connection:
                events.append(event)
                if event.type == "conversation.item.input_audio_transcription.completed":
                    break
            return events

    async with world(api_key="secret") as opened:
        port = opened.server.address[1]
        created, updated, committed, delta, completed = await trio.to_thread.run_sync(talk, port)
        assert created.session.type == updated.session.type == "transcription"
        assert updated.session.audio.input.transcription.model == MODEL
        assert delta.item_id == completed.item_id == committed.item_id
        assert (delta.delta, completed.transcript, completed.usage.seconds) == ("word0", "word0", 1)
