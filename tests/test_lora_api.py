"""Adapters over HTTP: their names as models, the list of models, loading and unloading."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from fake_engine import FakeEngine, open_fake_llm
from helpers_api import Client
from trioserve.config import LoRAModule
from trioserve.errors import InvalidConfigError
from trioserve.outputs import FinishReason
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MESSAGES = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def open_server(
    directory: Path, monkeypatch: pytest.MonkeyPatch, **engine_args: Any
) -> AsyncIterator[tuple[FakeEngine, Client]]:
    """Clients may load what lies in `directory`/adapters."""
    (directory / "adapters").mkdir()
    args = ServerArgs(enable_lora_updates=True, lora_directories=[str(directory / "adapters")])
    async with open_fake_llm(
        directory, monkeypatch, enable_lora=True, served_model_name=["base", "alias"], **engine_args
    ) as engine:
        engine.client.answers["load_lora"] = None
        yield engine, Client(engine.llm, args)


async def answer(engine: FakeEngine) -> None:
    """Every request with one token."""
    num_answered = 0
    while True:
        await trio.testing.wait_all_tasks_blocked()
        for add in engine.client.added[num_answered:]:
            engine.client.emit(add, "x", FinishReason.LENGTH)
            num_answered += 1
        await trio.sleep(0.001)


async def post(engine: FakeEngine, client: Client, path: str, body: dict[str, Any]) -> Any:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer, engine)
        reply = await client.post(path, body)
        nursery.cancel_scope.cancel()
    return reply


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}),
        ("/invocations", {"prompt": "Hi"}),
        ("/invocations", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions/batch", {"messages": [MESSAGES, MESSAGES]}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
async def test_an_adapter_is_a_model(
    path: str, body: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_server(tmp_path, monkeypatch, lora_modules=["sql=adapters/sql"]) as (engine, client):
        engine.llm.tokenizer.chat_template = "{{ messages[0].content }}"
        for name, key, told in [("sql", "sql#1", "sql"), ("alias", None, "base"), ("", None, "base")]:
            reply = await post(engine, client, path, {**body, "model": name})
            assert reply.status == 200, reply.body
            assert reply.json["model"] == told
            assert engine.client.added[-1].lora == key
        reply = await client.post(path, {**body, "model": "law"})
        assert reply.status == 404
        assert "law" in reply.error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
async def test_streams_name_the_adapter(
    path: str, body: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_server(tmp_path, monkeypatch, lora_modules=["sql=adapters/sql"]) as (engine, client):
        engine.llm.tokenizer.chat_template = "{{ messages[0].content }}"
        reply = await post(engine, client, path, {**body, "model": "sql", "stream": True})
        assert reply.status == 200, reply.body
        assert b'"model":"sql"' in reply.body
        assert b'"model":"base"' not in reply.body


@pytest.mark.parametrize(
    "name", ["org/law", "a b", "50%", "#1?x=y", "é→\U0001f600", '"quoted"', "..", "base/..", "A" * 1024]
)
async def test_names_of_all_kinds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = LoRAModule(name=name, path="l")
    async with open_server(tmp_path, monkeypatch, lora_modules=[module]) as (engine, client):
        reply = await post(engine, client, "/v1/completions", {"prompt": "Hi", "model": name})
        assert (reply.status, reply.json["model"]) == (200, name)
        assert engine.client.added[-1].lora == f"{name}#1"
        cards = (await client.get("/v1/models")).json["data"]
        assert cards[-1]["id"] == name
        assert (await client.get(f"/v1/models/{name}")).json == cards[-1]
        reply = await client.post("/v1/unload_lora_adapter", {"lora_name": name})
        assert reply.status == 200
        assert (await client.get(f"/v1/models/{name}")).status == 404


async def test_the_list_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = ["sql=adapters/sql", '{"name": "org/law", "path": "l", "base_model_name": "large"}']
    async with open_server(tmp_path, monkeypatch, lora_modules=modules) as (_, client):
        cards = (await client.get("/v1/models")).json["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("base", None), ("alias", None), ("sql", "base"), ("org/law", "large"),
        ]  # fmt: skip
        assert [card["root"] for card in cards] == ["fake", "fake", "adapters/sql", "l"]
        assert (await client.get("/v1/models/org/law")).json == cards[3]
        assert (await client.get("/v1/models/alias")).json == cards[1]
        assert (await client.get("/v1/models/law")).status == 404


async def test_loading_and_unloading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "adapters" / "sql")
    async with open_server(tmp_path, monkeypatch) as (engine, client):
        load = {"lora_name": "sql", "lora_path": path}
        reply = await client.post("/v1/load_lora_adapter", load)
        assert (reply.status, reply.body) == (200, b"Success: LoRA adapter 'sql' added successfully.")
        assert engine.client.calls[-1] == ("load_lora", "sql#1", path)
        cards = (await client.get("/v1/models")).json["data"]
        assert cards[-1]["id"] == "sql"
        assert cards[-1]["root"] == path
        reply = await client.post("/v1/load_lora_adapter", load)
        assert (reply.status, reply.error["param"]) == (400, "lora_name")
        assert (await client.post("/v1/load_lora_adapter", {**load, "load_inplace": True})).status == 200
        reply = await client.post("/v1/unload_lora_adapter", {"lora_name": "sql", "lora_int_id": 7})
        assert (reply.status, reply.body) == (200, b"Success: LoRA adapter 'sql' removed successfully.")
        reply = await client.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
        assert (reply.status, reply.error["param"]) == (404, "lora_name")
        reply = await client.post("/v1/completions", {"model": "sql", "prompt": "Hi"})
        assert reply.status == 404


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"lora_path": "x"}, 400, "lora_name"),
        ({"lora_name": "sql"}, 400, "lora_path"),
        ({"lora_name": "", "lora_path": "x"}, 400, "lora_name"),
        ({"lora_name": "sql", "lora_path": "x\0"}, 400, "lora_path"),
        ({"lora_name": "base", "lora_path": "INSIDE/sql"}, 400, "lora_name"),
        (
            {"lora_name": "sql", "lora_path": "INSIDE/sql", "is_3d_lora_weight": True},
            400,
            "is_3d_lora_weight",
        ),
        ({"lora_name": "sql", "lora_path": "/etc"}, 400, "lora_path"),
        ({"lora_name": "sql", "lora_path": "INSIDE/.."}, 400, "lora_path"),
        ({"lora_name": "sql", "lora_path": "INSIDE-too"}, 400, "lora_path"),
        ({"lora_name": "sql", "lora_path": "INSIDE/link"}, 400, "lora_path"),
    ],
)
async def test_refused_updates(
    body: dict[str, Any], status: int, param: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_server(tmp_path, monkeypatch) as (engine, client):
        inside = tmp_path / "adapters"
        (inside / "link").symlink_to("/etc")
        if "lora_path" in body:
            body = {**body, "lora_path": body["lora_path"].replace("INSIDE", str(inside))}
        reply = await client.post("/v1/load_lora_adapter", body)
        assert (reply.status, reply.error["param"]) == (status, param), reply.body
        assert not any("lora" in call[0] for call in engine.client.calls)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
async def test_files_that_lie_elsewhere(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither whether there is something nor what it is can be told from the answer."""
    async with open_server(tmp_path, monkeypatch) as (_, client):
        directory = tmp_path / "adapters" / "sql"
        directory.mkdir()
        (tmp_path / "secret").write_text('{"peft_type": "secret"}')
        body = {"lora_name": "sql", "lora_path": str(directory)}
        answers = set()
        for target in ("secret", "missing"):
            (directory / file).symlink_to(tmp_path / target)
            reply = await client.post("/v1/load_lora_adapter", body)
            answers.add((reply.status, reply.error["param"], reply.error["message"]))
            (directory / file).unlink()
        ((status, param, _),) = answers
        assert (status, param) == (400, "lora_path")
        (tmp_path / "adapters" / "blob").touch()
        (directory / file).symlink_to("../blob")
        assert (await client.post("/v1/load_lora_adapter", body)).status == 200


async def test_what_is_loaded_is_what_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that leads elsewhere by the time an engine core reads it, or the next one, counts no more."""
    async with open_server(tmp_path, monkeypatch) as (engine, client):
        (tmp_path / "adapters" / "v1").mkdir()
        (tmp_path / "adapters" / "current").symlink_to("v1")
        body = {"lora_name": "sql", "lora_path": str(tmp_path / "adapters" / "current")}
        assert (await client.post("/v1/load_lora_adapter", body)).status == 200
        assert engine.client.calls[-1] == ("load_lora", "sql#1", str(tmp_path / "adapters" / "v1"))


@pytest.mark.parametrize(("answer", "status"), [([True, "none in x"], 404), ([False, "rank"], 400)])
async def test_adapters_that_cannot_be_loaded(
    answer: list[Any], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_server(tmp_path, monkeypatch) as (engine, client):
        engine.client.answers["load_lora"] = answer
        body = {"lora_name": "sql", "lora_path": str(tmp_path / "adapters" / "x")}
        reply = await client.post("/v1/load_lora_adapter", body)
        assert (reply.status, reply.error["param"]) == (status, "lora_path")


async def test_the_routes_need_their_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_fake_llm(tmp_path, monkeypatch, enable_lora=True) as engine:
        body = {"lora_name": "sql", "lora_path": "x"}
        assert (await Client(engine.llm).post("/v1/load_lora_adapter", body)).status == 404
    with pytest.raises(InvalidConfigError, match="enable_lora_updates needs lora_directories"):
        ServerArgs(enable_lora_updates=True)
    with pytest.raises(InvalidConfigError, match="lora_directories must be empty without"):
        ServerArgs(lora_directories=["/"])


async def test_updates_need_an_engine_with_adapters(fake: FakeEngine) -> None:
    args = ServerArgs(enable_lora_updates=True, lora_directories=["/"])
    with pytest.raises(InvalidConfigError, match="enable_lora_updates must be false without enable_lora"):
        Client(fake.llm, args)
