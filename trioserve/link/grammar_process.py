"""The process that checks grammars: `python -m trioserve.link.grammar_process FD`, started by
`link.grammar_checker` only.

It takes a `Setup`, says that it is ready by an empty frame, and answers each frame of parameters with a
`Verdict`, until an end of file. Each check runs in a fork of its own, which may crash or be killed; the
tokenizer, which takes seconds to load, is there already.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.grammars.checking import Setup, Verdict, check
from trioserve.grammars.refusals import refusal
from trioserve.grammars.tokenizer import load_tokenizer
from trioserve.link.parent_watch import ask_kernel_for_death_signal
from trioserve.link.process import describe_exit
from trioserve.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from io import BufferedRWPair
    from multiprocessing.connection import Connection

    from llguidance import LLTokenizer

__all__ = ["main"]

_STACK_SIZE = 2**20
"""Bytes. The threads of the engine core have more (8 MiB, by default): what fits here fits there."""

_MEMORY = 2**31
"""Bytes that this process may take, tokenizer included."""

_NICENESS = 10
"""A check must not slow the steps of the engine core down."""

_LENGTH = struct.Struct("<I")

_forks = multiprocessing.get_context("fork")


def _serve(link: BufferedRWPair[Any, Any]) -> None:
    body = _read_frame(link)
    if body is None:
        return
    setup = msgspec.msgpack.decode(body, type=Setup)
    tokenizer = load_tokenizer(setup.model)
    _write_frame(link, b"")
    while (body := _read_frame(link)) is not None:
        _write_frame(link, _check_in_fork(setup, tokenizer, body))


def _check_in_fork(setup: Setup, tokenizer: LLTokenizer, body: bytes) -> bytes:
    """An encoded verdict, within the time limit."""
    receiving, sending = _forks.Pipe(duplex=False)
    with receiving:
        fork = _forks.Process(target=_check, args=(setup, tokenizer, body, sending))
        fork.start()
        sending.close()
        try:
            in_time = receiving.poll(setup.config.compile_timeout)
            return receiving.recv_bytes() if in_time else _too_slow(setup.config.compile_timeout)
        except EOFError:
            fork.join()
            return _crashed(fork.exitcode or 0)
        finally:
            fork.kill()
            fork.join()


def _check(setup: Setup, tokenizer: LLTokenizer, body: bytes, sending: Connection) -> None:
    ask_kernel_for_death_signal()
    # Even if our parent had gone before that call, this ends; as processor time, the limit is a loose one.
    seconds = math.ceil(setup.config.compile_timeout) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    params = msgspec.msgpack.decode(body, type=StructuredOutputsParams)
    sending.send_bytes(msgspec.msgpack.encode(check(setup, tokenizer, params)))


def _too_slow(timeout: float) -> bytes:
    return _refused(
        f"it is too complex: it did not compile within {timeout:g} seconds "
        "(--structured-outputs-config.compile_timeout)."
    )


def _crashed(status: int) -> bytes:
    return _refused(f"it is too complex: compiling it ended in a crash ({describe_exit(status)}).")


def _refused(reason: str) -> bytes:
    return msgspec.msgpack.encode(Verdict(refused=str(refusal(reason))))


def _read_frame(link: BufferedRWPair[Any, Any]) -> bytes | None:
    """None at the end of file. Frames: see `trioserve.link.framing`."""
    header = link.read(_LENGTH.size)
    return link.read(_LENGTH.unpack(header)[0]) if len(header) == _LENGTH.size else None


def _write_frame(link: BufferedRWPair[Any, Any], body: bytes) -> None:
    link.write(_LENGTH.pack(len(body)) + body)
    link.flush()


def _limit_resources() -> None:
    """Forks inherit them."""
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_SIZE, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)


def main() -> None:
    # No thread, because of the forks: an end of file is noticed between checks, each of which is short.
    ask_kernel_for_death_signal()
    # Signals from a terminal go to the whole process group; what they mean is for others to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _limit_resources()
    with socket.socket(fileno=int(sys.argv[1])) as link, link.makefile("rwb") as frames:
        _serve(frames)


if __name__ == "__main__":
    main()
