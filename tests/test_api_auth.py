"""Bearer keys."""

from __future__ import annotations

import pytest

from helpers_api import Client, FakeLLM
from trioserve.server_args import ServerArgs

TEXT = {"prompt": "Hi"}
KEYED = ServerArgs(api_key=("first-key", "zweiter-schlüssel"))


@pytest.mark.parametrize("key", KEYED.api_key)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_every_key_opens(key: str, scheme: str) -> None:
    header = f"{scheme} {key}".encode().decode("latin-1")  # clients send UTF-8; `Client` takes Latin-1
    assert (await Client(FakeLLM(), KEYED).post("/v1/completions", TEXT, authorization=header)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer first-key2"},
        {"authorization": "Bearer first-ke"},
        {"authorization": "Basic first-key"},
        {"authorization": "first-key"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/v1/nothing"])
async def test_without_a_key_everything_is_closed(path: str, headers: dict[str, str]) -> None:
    reply = await Client(FakeLLM(), KEYED).get(path, **headers)
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert (reply.error["type"], reply.error["code"]) == ("invalid_request_error", "invalid_api_key")


async def test_an_unauthorized_request_never_reaches_the_engine() -> None:
    llm = FakeLLM()
    assert (await Client(llm, KEYED).post("/v1/completions", TEXT)).status == 401
    assert not llm.calls


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_is_open(path: str) -> None:
    assert (await Client(FakeLLM(), KEYED).get(path)).status == 200


async def test_without_keys_everything_is_open() -> None:
    client = Client(FakeLLM())
    assert (await client.get("/v1/models")).status == 200
    assert (await client.get("/v1/models", authorization="Bearer anything")).status == 200
