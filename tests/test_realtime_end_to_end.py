"""WS /v1/realtime of a real server with a real model, for clients of others."""

from __future__ import annotations

import base64
import io
import json
import re
import wave
from typing import TYPE_CHECKING, Any

import pytest
from websockets.sync.client import connect

from helpers_speech import BECKETT, beckett
from served import ServedModel, served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = "whisper-tiny.en"


def words(text: str) -> list[str]:
    """Where a sentence was cut, Whisper may set another sign."""
    return re.findall(r"[a-z']+", text.lower())


def audio_events(**commit: Any) -> Iterator[str]:
    """The clip, as a microphone gives it, a tenth of a second at a time; and a commit."""
    with wave.open(io.BytesIO(beckett())) as clip:
        while data := clip.readframes(1600):
            audio = base64.b64encode(data).decode()
            yield json.dumps({"type": "input_audio_buffer.append", "audio": audio})
    yield json.dumps({"type": "input_audio_buffer.commit", **commit})


@pytest.fixture
def whisper(tmp_path: Path) -> Iterator[ServedModel]:
    with served(tmp_path, ["--model", MODEL]) as running:
        yield running


def test_a_clip_as_it_is_spoken(whisper: ServedModel) -> None:
    """By vLLM's events and by OpenAI's; then the server is told to end while somebody speaks."""
    url = f"ws://127.0.0.1:{whisper.port}/v1/realtime"
    with connect(url) as client:
        assert json.loads(client.recv())["type"] == "session.created"
        client.send(json.dumps({"type": "session.update", "model": MODEL}))
        for event in audio_events(final=True):
            client.send(event)
        *deltas, done = until(client, "transcription.done")
        assert len(deltas) == 2  # the clip has a pause
        assert "".join(event["delta"] for event in deltas) == done["text"]
        assert words(done["text"]) == words(BECKETT)
        assert done["usage"]["completion_tokens"] > 10
    with connect(f"{url}?intent=transcription") as client:
        client.recv()
        input_ = {"format": {"type": "audio/pcm", "rate": 16_000}, "turn_detection": {"type": "server_vad"}}
        session = {"type": "transcription", "audio": {"input": input_}}
        client.send(json.dumps({"type": "session.update", "session": session}))
        *appends, _ = audio_events()
        for event in appends:
            client.send(event)
        *_, first = until(client, "conversation.item.input_audio_transcription.completed")
        assert words(first["transcript"]) == words(BECKETT)[: len(words(first["transcript"]))]
        assert whisper.metric("websockets_open") == 1
        whisper.process.terminate()
        rest = [first["transcript"]]
        for message in client:
            event = json.loads(message)
            rest += [event["transcript"]] if event["type"].endswith(".completed") else []
        assert words(" ".join(rest)) == words(BECKETT)
        assert client.close_code == 1001
    assert whisper.process.wait(30) == 0, whisper.log
    assert "Traceback" not in whisper.log


def until(client: Any, kind: str) -> list[dict[str, Any]]:
    events = []
    for message in client:
        events.append(json.loads(message))
        assert events[-1]["type"] != "error", events[-1]
        if events[-1]["type"] == kind:
            return events
    raise AssertionError(events)
