"""No field of a request makes the server open a connection: pictures, files, schemas by URL are refused."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from helpers_api import Client, FakeLLM
from helpers_grammars import smollm2, tokenizer
from trioserve.config import StructuredOutputsConfig
from trioserve.grammars.checking import Setup, check
from trioserve.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TEXT_PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def chat_part(part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, **fields}


def schema(url: str) -> dict[str, Any]:
    return {"$schema": url, "$id": url, "type": "object", "properties": {"a": {"$ref": f"{url}#/$defs/a"}}}


URL = "URL"
"""Stands for one that would be seen if somebody fetched it."""
NAMED = {"name": "x", "schema": schema(URL)}
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "image_url": (CHAT_PATH, chat_part({"type": "image_url", "image_url": {"url": URL}})),
    "image_url, plain": (CHAT_PATH, chat_part({"type": "image_url", "image_url": URL})),
    "input_image": (CHAT_PATH, chat_part({"type": "input_image", "image_url": URL})),
    "video_url": (CHAT_PATH, chat_part({"type": "video_url", "video_url": {"url": URL}})),
    "audio_url": (CHAT_PATH, chat_part({"type": "audio_url", "audio_url": {"url": URL}})),
    "input_audio": (CHAT_PATH, chat_part({"type": "input_audio", "input_audio": {"data": URL}})),
    "file": (CHAT_PATH, chat_part({"type": "file", "file": {"file_data": URL, "file_url": URL}})),
    "input_file": (CHAT_PATH, chat_part({"type": "input_file", "file_url": URL})),
    "text": (CHAT_PATH, chat_part({"type": "text", "text": f"![]({URL})", "image_url": URL})),
    "content": (CHAT_PATH, {"messages": [{"role": "user", "content": f"<img src={URL}>"}]}),
    "name": (CHAT_PATH, {"messages": [{"role": "user", "content": "Hi", "name": URL, "audio": {"id": URL}}]}),
    "tools": (CHAT_PATH, chat(tools=[{"type": "mcp", "server_url": URL, "server_label": "x"}])),
    "function": (
        CHAT_PATH,
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": schema(URL)}}]),
    ),
    "web_search_options": (CHAT_PATH, chat(web_search_options={"user_location": URL})),
    "media": (CHAT_PATH, chat(mm_processor_kwargs={"url": URL}, media_io_kwargs={"url": URL})),
    "metadata": (CHAT_PATH, chat(metadata={"callback_url": URL}, webhook=URL, user=URL, store=True)),
    "template": (CHAT_PATH, chat(chat_template=URL, chat_template_kwargs={"url": URL})),
    "documents": (CHAT_PATH, chat(documents=[{"url": URL}])),
    "model": (CHAT_PATH, chat(model=URL)),
    "prompt": (TEXT_PATH, {"prompt": URL, "suffix": URL}),
    "kv_transfer_params": (TEXT_PATH, {"prompt": "Hi", "kv_transfer_params": {"remote_host": URL}}),
    "extra_args": (TEXT_PATH, {"prompt": "Hi", "vllm_xargs": {"url": URL}, "extra_args": {"url": URL}}),
    "model of a completion": (TEXT_PATH, {"prompt": "Hi", "model": URL}),
    **{
        f"{form} of {path}": (path, {"prompt": "Hi", "messages": MESSAGES, **fields})
        for path in (TEXT_PATH, CHAT_PATH)
        for form, fields in (
            ("response_format", {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
            ("structured_outputs", {"structured_outputs": {"json": schema(URL)}}),
            ("grammar", {"structured_outputs": {"grammar": f'%import "{URL}"\nstart: "a"'}}),
        )
    },
}  # fmt: skip


class Trap:
    """A listener that nobody should find."""

    def __init__(self) -> None:
        self.found = 0
        self.url = ""

    async def serve(self, stream: trio.SocketStream) -> None:
        self.found += 1
        await stream.aclose()


@asynccontextmanager
async def trap() -> AsyncIterator[Trap]:
    trapped = Trap()
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        host, port = listener.socket.getsockname()
        trapped.url = f"http://{host}:{port}/secret.json"
        nursery.start_soon(trio.serve_listeners, trapped.serve, [listener])
        yield trapped
        nursery.cancel_scope.cancel()


async def test_the_trap_works() -> None:
    async with trap() as trapped:
        host, _, port = trapped.url.removeprefix("http://").partition("/")[0].partition(":")
        stream = await trio.open_tcp_stream(host, int(port))
        assert await stream.receive_some() == b""
        await stream.aclose()
    assert trapped.found == 1


@pytest.mark.parametrize("name", FIELDS)
async def test_no_field_is_fetched(name: str) -> None:
    path, content = FIELDS[name]
    async with trap() as trapped:
        body = json.dumps(content).replace(URL, trapped.url).encode()
        reply = await Client(FakeLLM()).post(path, body)
        await trio.testing.wait_all_tasks_blocked()
    assert trapped.found == 0
    assert reply.status in {200, 400, 404}
    if name in {"image_url", "input_image", "video_url", "input_audio", "file", "input_file"}:
        assert reply.status == 400
        assert reply.error["param"].startswith("messages[0].content[1]")


@pytest.mark.parametrize("form", ["json", "grammar"])
async def test_the_engine_does_not_fetch_schemas(form: str) -> None:
    async with trap() as trapped:
        grammar = {"json": schema(trapped.url), "grammar": f'%import "{trapped.url}"\nstart: "a"'}[form]
        setup = Setup(model=smollm2(), config=StructuredOutputsConfig())
        verdict = check(setup, tokenizer(), StructuredOutputsParams(**{form: grammar}))  # type: ignore[arg-type]
        await trio.testing.wait_all_tasks_blocked()
    assert trapped.found == 0
    assert verdict.refused is not None
