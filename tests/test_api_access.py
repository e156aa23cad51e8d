"""Keys from the environment, and who a request counts as."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import quart

from helpers_api import Client, Exchange, FakeLLM
from trioserve.cli.environment import api_key_from_environment, take_api_keys_from_environment
from trioserve.cli.main import main
from trioserve.cli.serve_command import parse
from trioserve.server.auth import client_of_request
from trioserve.server_args import OPEN_PATHS, ServerArgs

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE = "TRIOSERVE_API_KEY"


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ("one", ("one",)),
        ("one,two", ("one", "two")),
        (" one\ttwo,\nthree ,", ("one", "two", "three")),
        ("", ()),
    ],
)
def test_the_environment_holds_several_keys(
    monkeypatch: pytest.MonkeyPatch, value: str, keys: tuple[str, ...]
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert api_key_from_environment() == (keys[0] if keys else None)
    assert take_api_keys_from_environment() == keys
    assert VARIABLE not in os.environ, "children would inherit it"


def test_an_environment_without_a_key_in_it_does_not_open_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, " , ")
    assert main(["serve"]) != 0
    assert "$TRIOSERVE_API_KEY must hold a key" in capsys.readouterr().err


def test_flags_win_over_the_environment_and_the_file_adds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text("from-file")
    monkeypatch.setenv(VARIABLE, "from-env")
    flags = ["--api-key", "a", "b", "--api-key", "c", "--api-key-file", str(path)]
    assert parse(flags)[1] == ServerArgs(api_key=["a", "b", "c", "from-file"])
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, "from-env")
    assert parse(["--api-key-file", str(path)])[1] == ServerArgs(api_key=["from-env", "from-file"])


def test_a_wrong_file_of_keys_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--api-key-file", str(tmp_path / "none")]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "api_key_file" in line
    assert "No such file" in line


def test_a_key_that_is_none_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--api-key", "s3cret word"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "--api-key" in error
    assert "s3cret" not in error


@pytest.mark.parametrize(
    ("flags", "paths"),
    [
        ([], OPEN_PATHS),
        (["--open-paths", ""], ()),
        (["--open-paths", "/metrics", "/ping"], ("/metrics", "/ping")),
    ],
)
def test_the_flag_of_open_paths(flags: list[str], paths: tuple[str, ...]) -> None:
    assert parse(flags)[1].open_paths == paths


# Who sent a request


async def identity(args: ServerArgs, peer: tuple[str, int] | None, **headers: str) -> str:
    """What later stages take the sender of a request for."""
    client = Client(FakeLLM(), args)
    found = []

    async def tell() -> quart.Response:
        found.append(client_of_request())
        return quart.Response(b"")

    client.app.get("/who")(tell)
    dashed = {name.replace("_", "-"): value for name, value in headers.items()}
    await Exchange(client.app, "GET", "/who", b"", dashed, peer=peer).run()
    (name,) = found
    return name


KEYED = ServerArgs(api_key=["a-key", "b-key"], open_paths="/who")


async def test_a_key_is_the_same_client_from_everywhere() -> None:
    first = await identity(KEYED, ("10.0.0.1", 1), authorization="Bearer a-key")
    assert first == await identity(KEYED, ("10.0.0.2", 2), authorization="bearer  a-key ")
    assert first != await identity(KEYED, ("10.0.0.1", 1), authorization="Bearer b-key")
    assert "a-key" not in first


async def test_without_a_right_key_the_address_counts() -> None:
    addresses = [
        await identity(ServerArgs(), ("10.0.0.1", 1)),
        await identity(ServerArgs(), ("10.0.0.1", 2), authorization="Bearer a-key"),
        await identity(KEYED, ("10.0.0.1", 3), authorization="Bearer wrong"),
        await identity(KEYED, ("::ffff:10.0.0.1", 4)),
    ]
    assert len(set(addresses)) == 1
    assert addresses[0] != await identity(ServerArgs(), ("10.0.0.2", 1))


async def test_headers_that_anybody_can_send_do_not_count() -> None:
    plain = await identity(ServerArgs(), ("10.0.0.1", 1))
    for header in ("x_forwarded_for", "x_real_ip", "forwarded", "remote_addr"):
        assert await identity(ServerArgs(), ("10.0.0.1", 1), **{header: "10.9.9.9"}) == plain


async def test_a_network_of_ipv6_is_one_client() -> None:
    first = await identity(ServerArgs(), ("2001:db8::1", 1))
    assert first == await identity(ServerArgs(), ("2001:db8::ffff:2", 1))
    assert first != await identity(ServerArgs(), ("2001:db8:0:1::1", 1))
    await identity(ServerArgs(), ("fe80::1%eth0", 1))


async def test_all_of_a_unix_socket_are_one_client() -> None:
    assert await identity(ServerArgs(), None) == await identity(ServerArgs(), None)
