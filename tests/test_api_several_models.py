"""Several models behind one application: which one a request means, and what they have in common."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import wait_all_tasks_blocked

from fake_engine import open_fake_llm
from helpers_api import Answer, Client, Exchange, FakeLLM, Reply
from trioserve.errors import (
    EngineDeadError,
    EngineRestartingError,
    InvalidConfigError,
    OverloadedError,
)
from trioserve.server.app import create_app
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from fake_engine import FakeEngine

JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/chat/completions/batch": {"messages": [MESSAGES]},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/inference/v1/generate": {"token_ids": [7], "sampling_params": {}},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/completions/render": {"prompt": "Hi"},
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/invocations": {"prompt": "Hi"},
}
"""All routes that belong to a model."""
FOR_ALL = {"/tokenize", "/detokenize"}
"""Those that do not ask which tasks it has."""


class World:
    """Two models that generate, "one" and "two", and one between them that does not, "pooler"."""

    def __init__(self, server_args: ServerArgs | None = None) -> None:
        self.one = FakeLLM(names=("one", "uno"))
        self.pooler = FakeLLM(names=("pooler",), tasks=("embed", "score"))
        self.two = FakeLLM(Answer(token_ids=(4, 5)), names=("two", "org/two"))
        self.llms = [self.one, self.pooler, self.two]
        self.client = Client(self.llms, server_args)

    async def ask(self, path: str, model: object = None, **fields: Any) -> Reply:
        body = BODIES[path] | fields | ({} if model is None else {"model": model})
        return await self.client.post(path, body)

    def exchange(self, model: str, **fields: Any) -> Exchange:
        body = {"prompt": "Hi", "model": model, **fields}
        return Exchange(self.client.app, "POST", "/v1/completions", json.dumps(body).encode(), JSON)


def metrics_of(page: Reply) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(page.body.decode())}


# Which model


def break_all_but(world: World, used: FakeLLM) -> None:
    """Whoever asks another one gets an exception."""
    for llm in world.llms:
        if llm is not used:
            llm.tokenizer = llm.submit = llm.render_chat = None  # type: ignore[assignment,method-assign]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["one", "uno", "two", "org/two"])
async def test_the_name_in_the_body_decides(path: str, name: str) -> None:
    world = World()
    break_all_but(world, world.one if name in {"one", "uno"} else world.two)
    reply = await world.ask(path, name)
    assert reply.status == 200, reply.body
    if isinstance(reply.json, dict) and "model" in reply.json:
        assert reply.json["model"] == ("one" if name == "uno" else name.removeprefix("org/"))


@pytest.mark.parametrize("path", sorted(FOR_ALL))
async def test_a_model_that_does_not_generate_has_tokens_too(path: str) -> None:
    world = World()
    break_all_but(world, world.pooler)
    assert (await world.ask(path, "pooler")).status == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("model", [None, ""])
async def test_without_a_name_the_first_that_can_does_it(path: str, model: str | None) -> None:
    world = World()
    world.client = Client([world.pooler, world.two, world.one])
    break_all_but(world, world.pooler if path in FOR_ALL else world.two)
    assert (await world.ask(path, model)).status == 200


@pytest.mark.parametrize("path", BODIES)
async def test_a_name_that_is_not_served(path: str) -> None:
    reply = await World().ask(path, "three")
    assert reply.status == 404
    if "/v1/messages" in path:
        assert reply.error["type"] == "not_found_error"
    else:
        assert (reply.error["code"], reply.error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("path", sorted(BODIES.keys() - FOR_ALL))
async def test_a_model_that_cannot_do_it(path: str) -> None:
    reply = await World().ask(path, "pooler")
    assert reply.status == 400
    assert "The model 'pooler' cannot do this: its tasks are embed, score." in reply.error["message"]
    assert "Here these can: 'one', 'two'." in reply.error["message"]


@pytest.mark.parametrize("path", sorted(BODIES.keys() - FOR_ALL - {"/invocations"}))
async def test_one_model_that_cannot_do_it(path: str) -> None:
    """Whatever the name is: there is none that could."""
    llm = FakeLLM(names=("pooler",), tasks=("embed", "score"))
    reply = await Client(llm).post(path, BODIES[path])
    assert reply.status == 400
    message = "No model here can do this. The tasks are of 'pooler' embed, score."
    assert reply.error["message"] == message
    client = Client([llm, FakeLLM(names=("ear",), tasks=("transcription",))])
    reply = await client.post(path, BODIES[path])
    assert reply.error["message"] == f"{message[:-1]}; of 'ear' transcription."


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"", b'{"model": 5, "prompt": "Hi"}', b'{"prompt": "Hi", "x": ' + b"[" * 5000, b"\xff"],
)
async def test_what_cannot_be_read_is_told_as_ever(body: bytes) -> None:
    replies = [
        await Client(llms).post("/v1/completions", body)
        for llms in (FakeLLM(), [FakeLLM(names=("one",)), FakeLLM(names=("two",))])
    ]
    assert replies[0].status == 400
    assert replies[0].body == replies[1].body


async def test_a_body_that_is_no_json_or_is_too_large() -> None:
    client = World(ServerArgs(max_body_size=100)).client
    assert (await client.call("POST", "/tokenize", b"Hi", {"content-type": "text/plain"})).status == 400
    assert (await client.post("/tokenize", {"prompt": "Hi", "model": "two", "x": "y" * 100})).status == 413


async def test_a_large_body() -> None:
    world = World()
    text = "Hi " * 200_000
    assert (await world.ask("/tokenize", "two", prompt=text)).json["count"] == 200_000


async def test_the_query_says_which_tokenizer() -> None:
    world = World(ServerArgs(enable_tokenizer_info_endpoint=True))
    world.two.tokenizer.chat_template = "of two"
    for query, template in ((b"", None), (b"model=two", "of two"), (b"model=uno", None)):
        exchange = Exchange(world.client.app, "GET", "/tokenizer_info", b"", {}, query=query)
        await exchange.run()
        assert exchange.reply.json["chat_template"] == template


async def test_an_adapter_belongs_to_its_model() -> None:
    world = World()
    world.two.loras = {"sql"}
    assert (await world.ask("/v1/completions", "sql")).json["model"] == "sql"
    assert (len(world.one.calls), len(world.two.calls)) == (0, 1)
    assert (await world.ask("/v1/completions", "other")).status == 404


async def test_a_conversation_may_go_on_with_another_model() -> None:
    world = World()
    first = (await world.ask("/v1/responses", "one")).json
    second = (await world.ask("/v1/responses", "two", previous_response_id=first["id"])).json
    assert second["model"] == "two"
    said = [message["content"] for message in world.two.rendered[0]["messages"]]
    assert said == ["Hi", "Hello, world", "Hi"]
    assert (await world.client.get(f"/v1/responses/{first['id']}")).json == first


async def test_names_must_differ() -> None:
    with pytest.raises(InvalidConfigError, match="must be another for each model, got 'a' twice"):
        Client([FakeLLM(names=("a", "b")), FakeLLM(names=("c", "a"))])
    with pytest.raises(InvalidConfigError, match="must be one at least"):
        Client([])


# What they have in common


async def test_the_list_of_models() -> None:
    world = World()
    cards = (await world.client.get("/v1/models")).json["data"]
    assert [card["id"] for card in cards] == ["one", "uno", "pooler", "two", "org/two"]
    assert [card["tasks"] for card in cards[1:3]] == [["generate"], ["embed", "score"]]
    assert (await world.client.get("/v1/models/org/two")).json == cards[-1]
    assert (await world.client.get("/v1/models/three")).status == 404


async def test_limits_count_the_requests_of_all() -> None:
    world = World(ServerArgs(max_concurrent_requests=1, max_concurrent_requests_per_key=2))
    world.one.outputs_left = 0
    async with trio.open_nursery() as nursery:
        running = world.exchange("one")
        nursery.start_soon(running.run)
        await wait_all_tasks_blocked()
        assert (await world.client.get("/load")).json == {"server_load": 1}
        refused = await world.ask("/v1/completions", "two")
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        running.leave()
    assert (await world.ask("/v1/completions", "two")).status == 200
    refusals = metrics_of(await world.client.get("/metrics"))["trioserve:requests_refused"].samples
    counted = {(sample.labels["model_name"], sample.labels["reason"]): sample.value for sample in refusals}
    assert counted["", "server_concurrency"] == 1
    assert counted["one", "queue_full"] == counted["two", "queue_full"] == 0


async def test_the_queue_of_one_is_full_and_the_other_answers() -> None:
    world = World()
    world.one.no_room = OverloadedError("full")
    assert (await world.ask("/v1/completions", "one")).status == 503
    assert (await world.ask("/v1/completions", "two")).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_frees_its_own(stream: bool) -> None:
    world = World()
    world.one.outputs_left = world.two.outputs_left = int(stream)
    async with trio.open_nursery() as nursery:
        exchanges = [world.exchange(name, stream=stream) for name in ("one", "two")]
        for exchange in exchanges:
            nursery.start_soon(exchange.run)
        await wait_all_tasks_blocked()
        exchanges[0].leave()
        await wait_all_tasks_blocked()
        assert (len(world.one.running), len(world.two.running)) == (0, 1)
        exchanges[1].leave()
    assert not world.two.running


async def test_a_deadline_is_counted_by_its_model(autojump_clock: trio.testing.MockClock) -> None:
    world = World()
    world.two.outputs_left = 0
    assert (await world.ask("/v1/completions", "two", timeout=1)).status == 504
    samples = metrics_of(await world.client.get("/metrics"))["trioserve:requests_expired"].samples
    assert {sample.labels["model_name"]: sample.value for sample in samples} == {
        "one": 0, "pooler": 0, "two": 1, "": 0,
    }  # fmt: skip


async def test_metrics_of_all_are_one_page() -> None:
    world = World()
    page = (await world.client.get("/metrics")).body.decode()
    names = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    up = metrics_of(await world.client.get("/metrics"))["trioserve:engine_up"].samples
    assert [sample.labels["model_name"] for sample in up] == ["one", "pooler", "two"]


async def test_keys_are_those_of_the_server() -> None:
    client = World(ServerArgs(api_key=("a-key",))).client
    body = {"prompt": "Hi", "model": "two"}
    assert (await client.post("/v1/completions", body)).status == 401
    assert (await client.post("/v1/completions", body, authorization="Bearer a-key")).status == 200


# Health


async def failing(error: Exception) -> None:
    await trio.lowlevel.checkpoint()
    raise error


@pytest.mark.parametrize(
    ("health", "code"),
    [
        (lambda: failing(EngineDeadError("gone")), "down"),
        (lambda: failing(EngineRestartingError("later")), "restarting"),
        (trio.sleep_forever, "not_answering"),
    ],
)
async def test_health_is_that_of_all(
    health: Callable[[], Any], code: str, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(ServerArgs(health_timeout=2))
    assert (await world.client.get("/health")).status == 200
    world.two.health = world.pooler.health = health
    reply = await world.client.get("/health/ready")
    assert (reply.status, reply.error["code"]) == (503, code)
    assert reply.error["message"] == f"The server is not ready: {code.replace('_', ' ')} (pooler, two)."
    assert (await world.client.get("/health")).status == 503
    assert (await world.client.get("/health/live")).status == 200
    world.two.errored = True
    assert (await world.client.get("/health/live")).status == 503


async def test_the_other_goes_on_while_one_restarts() -> None:
    world = World()
    world.one.no_room = EngineRestartingError("later")
    assert (await world.ask("/v1/completions", "one")).error["code"] == "engine_restarting"
    assert (await world.ask("/v1/completions", "two")).status == 200


# Steering


@pytest.fixture
async def engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[FakeEngine, FakeEngine]]:
    """Of the models "one" and "two"."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    lora = {"enable_lora": True}
    async with (
        open_fake_llm(tmp_path / "one", monkeypatch, served_model_name="one", **lora) as one,
        open_fake_llm(tmp_path / "two", monkeypatch, served_model_name="two", **lora) as two,
    ):
        yield one, two


async def steer(engines: tuple[FakeEngine, FakeEngine], method: str, target: str) -> Reply:
    path, _, query = target.partition("?")
    app = create_app([engine.llm for engine in engines], ServerArgs(enable_control_routes=True))
    exchange = Exchange(app, method, path, b"", {}, query=query.encode())
    await exchange.run()
    return exchange.reply


async def test_all_are_told_or_the_one_that_is_named(engines: tuple[FakeEngine, FakeEngine]) -> None:
    one, two = engines
    assert (await steer(engines, "POST", "/sleep?model=two")).status == 200
    assert (one.client.calls, two.client.calls) == ([], [("sleep", 1, "abort")])
    assert (await steer(engines, "POST", "/wake_up")).status == 200
    assert one.client.calls[-1] == two.client.calls[-1] == ("wake_up", None)
    reply = await steer(engines, "POST", "/sleep?model=three")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    reply = await steer(engines, "POST", "/sleep?modell=two")
    assert "There is no query parameter 'modell' here; known: level, mode, model." in reply.error["message"]


@pytest.mark.parametrize("path", ["/is_paused", "/is_sleeping"])
async def test_true_is_what_holds_for_all(engines: tuple[FakeEngine, FakeEngine], path: str) -> None:
    key = path.removeprefix("/")
    assert (await steer(engines, "GET", path)).json == {key: True}
    engines[0].client.answers[key] = False
    assert (await steer(engines, "GET", path)).json == {key: False}
    assert (await steer(engines, "GET", f"{path}?model=two")).json == {key: True}


async def test_one_that_is_gone_and_the_other_is_told(engines: tuple[FakeEngine, FakeEngine]) -> None:
    one, two = engines
    one.client.die()
    await one.llm.wait_dead()
    assert (await steer(engines, "POST", "/pause")).error["code"] == "engine_dead"
    assert two.client.calls == [("pause", "abort", True)]


async def test_adapters_are_loaded_for_the_model_that_is_named(
    engines: tuple[FakeEngine, FakeEngine], tmp_path: Path
) -> None:
    one, two = engines
    for engine in engines:
        engine.client.answers["load_lora"] = None  # it went well
    args = ServerArgs(enable_lora_updates=True, lora_directories=(str(tmp_path),))
    client = Client([one.llm, two.llm], args)  # type: ignore[list-item]  # real ones
    path = str(tmp_path)

    async def load(name: str, **more: str) -> Reply:
        return await client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more})

    assert (await load("sql", model="two")).status == 200
    assert (await load("poem")).status == 200
    assert [engine.llm.has_lora("sql") for engine in engines] == [False, True]
    assert [engine.llm.has_lora("poem") for engine in engines] == [True, False]
    for name in ("sql", "two"):
        refused = await load(name, model="one")
        assert (refused.status, refused.error["param"]) == (400, "lora_name")
        assert f"in use by another model, got '{name}'" in refused.error["message"]
    assert (await load("else", model="three")).status == 404
    ids = [card["id"] for card in (await client.get("/v1/models")).json["data"]]
    assert ids == ["one", "two", "poem", "sql"]
    assert (await client.get("/v1/models/sql")).json["parent"] == "two"
    assert (await client.post("/v1/unload_lora_adapter", {"lora_name": "sql"})).status == 200
    assert not two.llm.has_lora("sql")
    assert (await client.post("/v1/unload_lora_adapter", {"lora_name": "sql"})).status == 404
