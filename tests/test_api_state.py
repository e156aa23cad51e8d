"""Models, metrics, version, and the identity of requests."""

from __future__ import annotations

import attrs
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fake_engine import STATS
from helpers_api import Client, FakeLLM
from trioserve.version import __version__


async def test_models() -> None:
    client = Client(FakeLLM())
    reply = await client.get("/v1/models")
    assert [card["id"] for card in reply.json["data"]] == ["small", "also-small"]
    assert {card["max_model_len"] for card in reply.json["data"]} == {64}
    assert (await client.get("/v1/models/also-small")).json == reply.json["data"][1]


async def test_a_model_that_is_not_served() -> None:
    reply = await Client(FakeLLM()).get("/v1/models/org/large")
    assert (reply.status, reply.error["param"]) == (404, "model")
    assert "org/large" in reply.error["message"]


async def test_metrics() -> None:
    llm = FakeLLM()
    llm.metrics.record_stats(attrs.evolve(STATS, num_generation_tokens=5))
    reply = await Client(llm).get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(reply.body.decode())}
    assert families["trioserve:generation_tokens"].samples[0].value == 5


async def test_version() -> None:
    assert (await Client(FakeLLM()).get("/version")).json == {"version": __version__}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_request_id_of_the_header_wins(path: str) -> None:
    llm = FakeLLM()
    request = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "request_id": "mine"}
    reply = await Client(llm).post(path, request, x_request_id="abc")
    assert reply.headers["x-request-id"] == "abc"
    assert reply.json["id"].endswith("-abc")
    assert llm.calls[0].request_id.startswith(reply.json["id"])


async def test_request_id_of_the_body() -> None:
    reply = await Client(FakeLLM()).post("/v1/completions", {"prompt": "Hi", "request_id": "mine"})
    assert (reply.headers["x-request-id"], reply.json["id"]) == ("mine", "cmpl-mine")


async def test_request_ids_are_made_up_where_none_is_given() -> None:
    client = Client(FakeLLM())
    ids = [(await client.post("/v1/completions", {"prompt": "Hi"})).json["id"] for _ in range(2)]
    assert ids[0] != ids[1]
    assert (await client.get("/v1/nothing")).headers["x-request-id"]


async def test_a_request_id_that_would_break_a_log_line_is_refused() -> None:
    reply = await Client(FakeLLM()).get("/version", x_request_id="x" * 300)
    assert (reply.status, reply.error["param"]) == (400, "X-Request-Id")
    assert "X-Request-Id must be at most 256 printable ASCII characters" in reply.error["message"]
