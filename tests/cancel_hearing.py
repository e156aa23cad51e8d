"""An engine that hears, for `cancel_everywhere`: a script answers its questions, and all else is real.

What is decoded and tokenized in threads takes part as well: a cancellation there waits for the thread.
"""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
from trio.testing import wait_all_tasks_blocked

from cancel_everywhere import ABORTED, BesideANeighbour, LeakError
from cancel_http import HttpKind
from cancel_kinds import Kind
from helpers_audio import encode, form, silence, wav
from helpers_http import post
from helpers_speech import FakeHearing, open_hearing_llm, said
from trioserve import TranscriptionParams
from trioserve.errors import UnfinishedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    import pytest

    from cancel_everywhere import Target

__all__ = ["HEARD_IN_A_LIBRARY", "HEARD_OVER_HTTP", "HearingWorld", "open_hearing_world"]

_CLIP = wav(bytes(2 * 16_000))
_LONG = encode(silence(31, rate=8000), "flac", "flac", rate=8000)  # two windows
_WORD = " So."
_ONE_BEAM = TranscriptionParams(temperature=(0,), beam_width=1)


class HearingWorld(BesideANeighbour):
    """A `cancel_everywhere.World` in which every window says the same."""

    def __init__(self, hearing: FakeHearing) -> None:
        self.llm = hearing.fake.llm
        self._client = hearing.fake.client

    async def _be_a_neighbour(self) -> None:
        while not self.is_enough:
            async with self.llm.transcribe(_CLIP) as stream:
                heard = await stream.finish()
            if heard.text != _WORD.strip():
                raise LeakError(f"a neighbour heard {heard.text!r}")

    async def find_leaks(self) -> Mapping[str, object]:
        transcriber = self.llm._transcriber
        assert transcriber is not None
        added = {add.request_id for add in self._client.added}
        found = {
            "open requests": self.llm.num_open_requests,
            "places": self.llm._outputs.admission.num_open,
            "seconds of audio": transcriber.intake.seconds_held,
            "aborts of what was never added": set(self._client.aborted) - added,
        }
        return {what: which for what, which in found.items() if which}

    async def rest(self) -> None:
        await wait_all_tasks_blocked()


@asynccontextmanager
async def open_hearing_world(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HearingWorld]:
    async with open_hearing_llm(directory, monkeypatch, strict=False) as fake:
        hearing = FakeHearing(fake, lambda _add, _index: said(0.0, _WORD, 30.0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hearing.answer)
            yield HearingWorld(hearing)
            nursery.cancel_scope.cancel()


# In a library


async def _transcribe(
    world: HearingWorld, target: Target, audio: bytes, params: TranscriptionParams
) -> object:
    target.abort = lambda: world.llm.abort("mine")
    with target.here():
        try:
            async with world.llm.transcribe(audio, params, request_id="mine") as stream:
                parts = [update.text async for update in stream]
        except UnfinishedError:
            return ABORTED
        return "".join(parts)
    return None


def _heard(name: str, audio: bytes, num_windows: int, params: TranscriptionParams) -> Kind:
    async def run(world: Any, target: Target) -> object:
        return await _transcribe(world, target, audio, params)

    async def expected(_: object) -> object:
        return (_WORD * num_windows).strip()

    return Kind(name, run, expected)


HEARD_IN_A_LIBRARY = [
    _heard("transcribe", _CLIP, 1, TranscriptionParams()),
    _heard("transcribe, as it is written", _CLIP, 1, _ONE_BEAM),
    _heard("transcribe, two windows", _LONG, 2, TranscriptionParams()),
]


# Over HTTP


class _HeardKind(HttpKind):
    def request(self) -> bytes:
        body, headers = form(_CLIP, **self.body)
        return post(self.path, body, f"content-type: {headers['content-type']}", "connection: close")

    def result_in(self, response: bytes) -> object:
        head, _, body = response.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            return None
        if b"text/event-stream" not in head:
            return json.loads(body)["text"]
        events = re.findall(rb"^data: (.*)$", body, re.MULTILINE)
        return json.loads(events[-2])["text"] if events[-1:] == [b"[DONE]"] else None


def _posted(name: str, **fields: str) -> HttpKind:
    async def expected(_: object) -> object:
        return _WORD.strip()

    return _HeardKind(name, "/v1/audio/transcriptions", fields, expected)


HEARD_OVER_HTTP = [
    _posted("transcription"),
    _posted("transcription, stream", stream="true"),
]
