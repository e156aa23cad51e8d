"""Where a server listens, and what it does where somebody else does."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from trioserve import InvalidConfigError, ServerArgs
from trioserve.server.listeners import bound_listener, describe, start_listening

if TYPE_CHECKING:
    from pathlib import Path


def test_a_port_is_taken_from_the_moment_it_is_bound() -> None:
    args = ServerArgs(port=0)
    with bound_listener(args) as first:
        port = first.getsockname()[1]
        assert describe(first, args) == f"http://127.0.0.1:{port}"
        with pytest.raises(InvalidConfigError, match=f"port {port}"), bound_listener(ServerArgs(port=port)):
            raise AssertionError("it is taken")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        start_listening(first, args)
        with socket.create_connection(("127.0.0.1", port)):
            first.accept()[0].close()  # this side first: the connection lingers in TIME_WAIT here
    with bound_listener(ServerArgs(port=port)) as next_one:
        start_listening(next_one, ServerArgs(port=port))


def test_a_host_that_does_not_exist() -> None:
    with pytest.raises(InvalidConfigError, match="host"), bound_listener(ServerArgs(host="256.0.0.1")):
        raise AssertionError("there is no such host")


def test_a_unix_socket_appears_when_it_is_served_and_goes_with_its_server(tmp_path: Path) -> None:
    args = ServerArgs(uds=str(tmp_path / "socket"))
    with bound_listener(args) as listener:
        assert not (tmp_path / "socket").exists()
        start_listening(listener, args)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "socket"))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_is_replaced_and_what_is_served_is_not(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    args = ServerArgs(uds=str(path))
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with bound_listener(args) as listener:
        start_listening(listener, args)
        with pytest.raises(InvalidConfigError, match="another server"), bound_listener(args):
            raise AssertionError("it is served")
    assert not path.exists()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(InvalidConfigError, match="no socket"), bound_listener(ServerArgs(uds=str(path))):
        raise AssertionError("it is a file")
    assert path.read_text() == "mine"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_an_inherited_socket_is_served_and_closed_and_its_path_stays(
    family: socket.AddressFamily, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    made = socket.socket(family)
    made.bind(str(path) if family is socket.AF_UNIX else ("127.0.0.1", 0))
    made.listen()
    address = made.getsockname()
    args = ServerArgs(fd=made.detach())
    with bound_listener(args) as listener:
        start_listening(listener, args)
        assert listener.getsockname() == address
        assert not os.get_inheritable(listener.fileno())
        with socket.socket(family) as client:
            client.connect(address)
        where = f"unix:{path}" if family is socket.AF_UNIX else f"http://127.0.0.1:{address[1]}"
        assert describe(listener, args) == where
    assert listener.fileno() == -1
    assert path.exists() == (family is socket.AF_UNIX)


def test_an_fd_that_is_no_listening_socket_is_refused_and_left_open(tmp_path: Path) -> None:
    with (
        (tmp_path / "notes").open("w") as file,
        socket.socket() as silent,
        socket.socket(type=socket.SOCK_DGRAM) as datagrams,
    ):
        silent.bind(("127.0.0.1", 0))
        for fd in (file.fileno(), silent.fileno(), datagrams.fileno(), 9999):
            with (
                pytest.raises(InvalidConfigError, match=f"fd {fd} ") as caught,
                bound_listener(ServerArgs(fd=fd)),
            ):
                raise AssertionError("it cannot be served")
            assert caught.value.field == "fd"
        for fd in (file.fileno(), silent.fileno(), datagrams.fileno()):
            os.fstat(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system's own settings hold")
@pytest.mark.parametrize("inherited", [False, True])
@pytest.mark.parametrize(
    ("write_timeout", "patience"), [(30.0, 60_000), (100.0, 100_000), (1e9, 2**31 - 1000)]
)
def test_the_kernel_looks_after_clients_whose_network_has_vanished(
    inherited: bool, write_timeout: float, patience: int
) -> None:
    fd = socket.create_server(("127.0.0.1", 0)).detach() if inherited else None
    args = ServerArgs(port=0, fd=fd, write_timeout=write_timeout)
    with bound_listener(args) as listener:
        start_listening(listener, args)
        with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            values = [accepted.getsockopt(socket.IPPROTO_TCP, option) for option in options]
            assert values == [30, 10, 3, patience]
            assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) != 30  # the system's default


def test_where_a_server_with_a_certificate_is_found(tmp_path: Path) -> None:
    args = ServerArgs(port=0, ssl_certfile="cert.pem")
    with bound_listener(args) as listener:
        assert describe(listener, args) == f"https://127.0.0.1:{listener.getsockname()[1]}"
    args = ServerArgs(uds=str(tmp_path / "socket"), ssl_certfile="cert.pem")
    with bound_listener(args) as listener:
        assert describe(listener, args) == f"unix:{tmp_path}/socket (TLS)"
