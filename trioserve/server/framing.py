"""The bytes of a chunk: what is the same in every chunk of a response is encoded once."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import attrs
import msgspec

from trioserve.server.protocol.errors import ErrorDetail, ErrorResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trioserve.server.protocol.usage import Usage

__all__ = ["DONE", "KEEP_ALIVE", "ChunkFraming", "ReplyHead", "last_frames"]

DONE = b"data: [DONE]\n\n"

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients of server-sent events pass over it (WHATWG HTML, section 9.2.6)."""

_encode = msgspec.json.Encoder().encode

_MARK = uuid.uuid4().hex
_ENCODED_MARK = _encode(_MARK)


@attrs.frozen(kw_only=True)
class ReplyHead:
    """What a response and all of its chunks have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | None = None
    """What clients are told if they asked for one."""


class ChunkFraming:
    """Makes `data: {...}` frames of one response; each carries one choice."""

    def __init__(self, kind: str, head: ReplyHead, *, wants_usage: bool) -> None:
        """`kind` is the value of the key `object`; with `wants_usage` every chunk has a key `usage`."""
        start = _encode(
            {
                "id": head.id,
                "object": kind,
                "created": head.created,
                "model": head.model,
                "service_tier": head.service_tier,
                "system_fingerprint": head.system_fingerprint,
            }
        )
        self._start = b"data: " + start.removesuffix(b"}") + b',"choices":['
        self._end = b'],"usage":null}\n\n' if wants_usage else b"]}\n\n"

    def frame(self, choice: object, usage: Usage | None = None) -> bytes:
        """A chunk of this choice; `usage` is given where every chunk is to carry one."""
        end = self._end if usage is None else b'],"usage":' + _encode(usage) + b"}\n\n"
        return self._start + _encode(choice) + end

    def text_frames(self, choice: Callable[[str], object]) -> Callable[[str], bytes]:
        """What makes chunks that differ in one text only: `choice(text)` is asked for once, and must have the
        text in one place."""
        before, after = self.frame(choice(_MARK)).split(_ENCODED_MARK)

        def frame(text: str) -> bytes:
            return before + _encode(text) + after

        return frame

    def frame_with(self, more: Mapping[str, object], choice: object, usage: Usage | None) -> bytes:
        """As `frame`, with `more` keys beside the choices."""
        frame = self.frame(choice, usage).removesuffix(b"}\n\n")
        return frame + b"," + _encode(more).removeprefix(b"{") + b"\n\n"

    def usage_frame(self, usage: Usage) -> bytes:
        """The chunk without a choice."""
        return self._start + b'],"usage":' + _encode(usage) + b"}\n\n"


def last_frames(detail: ErrorDetail) -> bytes:
    """How a stream ends that did not come to its end."""
    return b"data: " + _encode(ErrorResponse(detail)) + b"\n\n" + DONE
