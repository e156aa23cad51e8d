"""Bearer keys: who may come, which paths are open, and that no key is told or kept."""

from __future__ import annotations

import hmac
import logging
from typing import TYPE_CHECKING

import attrs
import pytest

from helpers_api import Client, FakeLLM
from trioserve.errors import InvalidConfigError
from trioserve.server.api_keys import ApiKeys, read_key_file
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from pathlib import Path

TEXT = {"prompt": "Hi"}
KEYS = ("first-key", "zweiter-schlüssel")
KEYED = ServerArgs(api_key=KEYS)
WRONG = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer "},
    {"authorization": "Bearer wrong"},
    {"authorization": "Bearer first-key2"},
    {"authorization": "Bearer first-ke"},
    {"authorization": "Basic first-key"},
    {"authorization": "first-key"},
]


def bearer(key: str, scheme: str = "Bearer") -> str:
    """Clients send UTF-8; `Client` takes Latin-1."""
    return f"{scheme} {key}".encode().decode("latin-1")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_every_key_opens(key: str, scheme: str) -> None:
    client = Client(FakeLLM(), KEYED)
    assert (await client.post("/v1/completions", TEXT, authorization=bearer(key, scheme))).status == 200


@pytest.mark.parametrize("headers", WRONG)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/v1/nothing", "/health/nothing"])
async def test_without_a_key_everything_is_closed(path: str, headers: dict[str, str]) -> None:
    reply = await Client(FakeLLM(), KEYED).get(path, **headers)
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert (reply.error["type"], reply.error["code"]) == ("invalid_request_error", "invalid_api_key")


async def test_who_has_no_key_cannot_tell_which_paths_there_are() -> None:
    client = Client(FakeLLM(), KEYED)
    replies = [
        await client.get(path) for path in ("/v1/models", "/v1/nothing", "/v1/completions", "/metrics/")
    ]
    assert {reply.status for reply in replies} == {401}
    assert len({reply.body for reply in replies}) == 1
    assert (await client.get("/v1/nothing", authorization="Bearer first-key")).status == 404
    for method in ("DELETE", "OPTIONS", "BREW"):
        assert (await client.call(method, "/v1/models", b"", {})).status == 401


async def test_an_unauthorized_request_never_reaches_the_engine() -> None:
    llm = FakeLLM()
    assert (await Client(llm, KEYED).post("/v1/completions", TEXT)).status == 401
    assert not llm.calls


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/ping"])
async def test_health_is_open(path: str) -> None:
    assert (await Client(FakeLLM(), KEYED).get(path)).status == 200


async def test_other_paths_can_be_open_instead() -> None:
    client = Client(FakeLLM(), attrs.evolve(KEYED, open_paths=("/metrics", "/health")))
    statuses = [(await client.get(path)).status for path in ("/metrics", "/health", "/ping", "/metrics/x")]
    assert statuses == [200, 200, 401, 401]


async def test_no_path_need_be_open() -> None:
    client = Client(FakeLLM(), attrs.evolve(KEYED, open_paths=""))
    assert (await client.get("/health")).status == 401
    assert (await client.get("/health", authorization="Bearer first-key")).status == 200


@pytest.mark.parametrize("value", ["health", ["/health", ""], [3], ["", ""]])
def test_what_is_no_path_is_refused(value: object) -> None:
    with pytest.raises(InvalidConfigError, match="open_paths must be paths, each beginning with /"):
        ServerArgs(open_paths=value)  # type: ignore[arg-type]


async def test_without_keys_everything_is_open() -> None:
    client = Client(FakeLLM())
    assert (await client.get("/v1/models")).status == 200
    assert (await client.get("/v1/models", authorization="Bearer anything")).status == 200


# The file of keys


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def keyed_by_file(path: Path, text: str, other_key: str) -> ServerArgs:
    path.write_text(text, encoding="utf-8")
    return ServerArgs(api_key=other_key, api_key_file=str(path))


async def test_keys_of_a_file_come_beside_the_others(key_file: Path) -> None:
    text = "\ufeff# of the team\n\n  alpha-key  # Alice\nbeta#key\r\n# end"
    client = Client(FakeLLM(), keyed_by_file(key_file, text, "first-key"))
    for key in ("alpha-key", "beta#key", "first-key"):
        assert (await client.get("/version", authorization=f"Bearer {key}")).status == 200
    for key in ("# of the team", "# Alice", "of", "beta", "\ufeff"):
        assert (await client.get("/version", authorization=bearer(key))).status == 401


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "holds no key"),
        (b"# none yet\n\n", "holds no key"),
        (b"fine\ns3cret and more\n", "has more than one key in line 2"),
        (b"s3cret\xff\n", "is not UTF-8 text"),
    ],
)
def test_a_wrong_file_is_refused_and_no_line_of_it_shown(
    key_file: Path, content: bytes, problem: str
) -> None:
    key_file.write_bytes(content)
    with pytest.raises(InvalidConfigError, match="api_key_file") as caught:
        read_key_file(str(key_file))
    assert problem in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_file_that_is_not_there(key_file: Path) -> None:
    with pytest.raises(InvalidConfigError, match="cannot be read: No such file"):
        Client(FakeLLM(), ServerArgs(api_key_file=str(key_file)))
    with pytest.raises(InvalidConfigError, match="cannot be read: Is a directory"):
        read_key_file(str(key_file.parent))


# Secrecy


@pytest.mark.parametrize(
    "value", ["", "s3cret with space", ["s3cret", ""], ["s3cret\n"], [b"s3cret"], [None]]
)
def test_what_is_no_key_is_refused_and_not_shown(value: object) -> None:
    with pytest.raises(InvalidConfigError, match="api_key must be a key or a list of keys") as caught:
        ServerArgs(api_key=value)  # type: ignore[arg-type]
    assert "s3cret" not in str(caught.value)


async def test_no_key_is_kept_logged_or_told(caplog: pytest.LogCaptureFixture, key_file: Path) -> None:
    caplog.set_level(logging.DEBUG)
    args = keyed_by_file(key_file, "s3cret-of-file", "s3cret-of-flag")
    client = Client(FakeLLM(), args)
    replies = [
        await client.get("/v1/models", authorization=f"Bearer {key}")
        for key in ("s3cret-of-flag", "s3cret-of-file", "s3cret-of-nobody")
    ]
    assert [reply.status for reply in replies] == [200, 200, 401]
    held = [repr(attrs.asdict(holder)) for holder in (args, ApiKeys.of(args))]
    told = [f"{reply.headers} {reply.body!r}" for reply in replies]
    for text in (*held, *told, repr(args), repr(ApiKeys.of(args)), caplog.text):
        assert "s3cret" not in text


async def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the time tells nothing."""
    compared: list[bool] = []
    original = hmac.compare_digest

    def count(one: str, other: str) -> bool:
        compared.append(original(one, other))
        return compared[-1]

    monkeypatch.setattr(hmac, "compare_digest", count)
    client = Client(FakeLLM(), ServerArgs(api_key=["a", "b", "c"]))
    for key, matches in (("a", 1), ("c", 1), ("none", 0)):
        compared.clear()
        await client.get("/version", authorization=f"Bearer {key}")
        assert (len(compared), sum(compared)) == (3, matches)
