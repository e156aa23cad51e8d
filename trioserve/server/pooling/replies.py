"""Answers that may be large: 2048 texts of 384 values each are 16 MB of JSON.

Text of that size takes tens of milliseconds to make, all of which would hold the interpreter's lock, in a
thread as well. So it is made a piece at a time, while it is sent, and other tasks run in between; a client
that reads slowly has the server hold the values (3 MB), and not their text.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import trio
from quart import Response

from trioserve.server.streamed_body import StreamedBody

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["bytes_reply", "encode_each", "large_json_reply"]

_PIECE = 2**16
"""Bytes: about half a millisecond's work, if they are text."""

_encode = msgspec.json.Encoder().encode


def encode_each(items: Iterable[object]) -> Iterator[bytes]:
    """Each as JSON, once it is asked for."""
    return map(_encode, items)


def large_json_reply(content: object, lists: Mapping[str, Iterable[bytes]]) -> Response:
    """`content` as JSON, in which the lists under these keys, in the order in which they come, are empty:
    here is what they hold, each item as JSON."""
    pieces = _in_pieces(_filled(_encode(content), lists))
    return _reply(pieces, {"Content-Type": "application/json"}, None)


def bytes_reply(parts: Iterable[bytes], size: int, headers: dict[str, str]) -> Response:
    """Of `size` bytes in all."""
    return _reply(_in_pieces(parts), {"Content-Type": "application/octet-stream", **headers}, size)


def _reply(pieces: Iterator[bytes], headers: dict[str, str], size: int | None) -> Response:
    """What is one piece goes as a whole."""
    first, second = next(pieces, b""), next(pieces, None)
    if second is None:
        return Response(first, headers=headers)
    response = Response(_Body(chain((first, second), pieces)), headers=headers)
    if size is not None:
        response.content_length = size
    response.timeout = None
    return response


def _filled(envelope: bytes, lists: Mapping[str, Iterable[bytes]]) -> Iterator[bytes]:
    rest = envelope
    for key, items in lists.items():
        # Within a string it would be written \"key\":[], so it is found nowhere else.
        head, found, rest = rest.partition(_encode(key) + b":[]")
        assert found, f"there is no empty list under {key}"
        yield head + found[:-1]
        for index, item in enumerate(items):
            yield b"," + item if index else item
        yield b"]"
    yield rest


def _in_pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, in pieces of at least `_PIECE` but for the last."""
    held: list[bytes] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= _PIECE:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


class _Body(StreamedBody):
    """Makes a piece when the one before has been sent; a checkpoint before each."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint()
        piece = next(self._pieces, None)
        if piece is None:
            raise StopAsyncIteration
        return piece
