"""The process that checks grammars: `python -m trioserve.link.grammar_process FD`, started by
`link.grammar_checker` only.

It takes a `Setup`, says that it is ready by an empty frame, and answers each frame of parameters with a
`Verdict`, until an end of file. A grammar may crash it or keep it busy; then its parent kills it.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import sys
import threading
from typing import BinaryIO

import msgspec

from trioserve.grammars.checking import Setup, check
from trioserve.grammars.tokenizer import load_tokenizer
from trioserve.link.parent_watch import dies_with_parent
from trioserve.structured_outputs import StructuredOutputsParams

__all__ = ["main"]

_STACK_SIZE = 2**20
"""Bytes. The threads of the engine core have more (8 MiB, by default): what fits here fits there."""

_MEMORY = 2**31
"""Bytes that this process may take, tokenizer included."""

_NICENESS = 10
"""A check must not slow the steps of the engine core down."""

_LENGTH = struct.Struct("<I")


def _serve(link: BinaryIO) -> None:
    body = _read_frame(link)
    if body is None:
        return
    setup = msgspec.msgpack.decode(body, type=Setup)
    tokenizer = load_tokenizer(setup.model)
    _write_frame(link, b"")
    while (body := _read_frame(link)) is not None:
        params = msgspec.msgpack.decode(body, type=StructuredOutputsParams)
        _write_frame(link, msgspec.msgpack.encode(check(setup, tokenizer, params)))


def _read_frame(link: BinaryIO) -> bytes | None:
    """None at the end of file. Frames: see `trioserve.link.framing`."""
    header = link.read(_LENGTH.size)
    return link.read(_LENGTH.unpack(header)[0]) if len(header) == _LENGTH.size else None


def _write_frame(link: BinaryIO, body: bytes) -> None:
    link.write(_LENGTH.pack(len(body)) + body)
    link.flush()


def main() -> None:
    # Signals from a terminal go to the whole process group; what they mean is for others to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it may crash, and nobody wants to know where
    os.nice(_NICENESS)
    threading.stack_size(_STACK_SIZE)
    with socket.socket(fileno=int(sys.argv[1])) as link, dies_with_parent(link.fileno()):
        # In a thread for the sake of its small stack; an error in it ends the process all the same.
        thread = threading.Thread(target=_serve, args=(link.makefile("rwb"),), name="checks")
        thread.start()
        thread.join()


if __name__ == "__main__":
    main()
