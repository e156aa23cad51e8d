"""Headers of HTTP/2: what they ask for, and which may go out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import attrs

from trioserve.server.request_ids import REQUEST_ID_HEADER, given_request_id

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trioserve.server.http_context import HttpLimits

__all__ = ["Headers", "Http2Refusal", "Http2Request", "read_request", "response_head"]

Headers = list[tuple[bytes, bytes]]

_MAX_HEADERS = 100  # as on HTTP/1.1
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_VALUE = re.compile(rb"[^\x00\r\n]*")
_VISIBLE = re.compile(rb"[\x21-\x7e]+")  # what a target may be made of, as on HTTP/1.1
_UNKNOWN = b"-"

# They are about an HTTP/1.1 connection, and must not go out (RFC 9113, section 8.2.2).
_OF_THE_CONNECTION = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}


@attrs.frozen
class Http2Refusal:
    status: int
    message: str
    headers: Headers = attrs.field(factory=list)


@attrs.frozen
class Http2Request:
    """As ASGI wants it: `:authority` is the host, and no header is a pseudo-header.

    A method or target that is not what it should be shows as "-": the refusal of it goes into the log.
    """

    method: str
    target: bytes
    headers: Headers
    refusal: Http2Refusal | None


def read_request(headers: Iterable[tuple[bytes, bytes]], limits: HttpLimits) -> Http2Request:
    """`headers` were found to be well-formed by h2, which is content with any bytes in a path or a method."""
    pseudo, rest = {}, []
    for name, value in headers:
        if name.startswith(b":"):
            pseudo[name] = value
        else:
            rest.append((name, value))
    method, target = pseudo[b":method"], pseudo.get(b":path", b"")
    if authority := pseudo.get(b":authority"):
        rest = [(b"host", authority), *((name, value) for name, value in rest if name != b"host")]
    refusal = _objection(method, target, rest, limits)
    if refusal is not None and (request_id := given_request_id(rest)):
        refusal = attrs.evolve(refusal, headers=[(REQUEST_ID_HEADER, request_id)])
    if not _TOKEN.fullmatch(method):
        method = _UNKNOWN
    if not _VISIBLE.fullmatch(target):
        target = _UNKNOWN
    return Http2Request(method.decode(), target, rest, refusal)


def response_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """What goes out.

    Raises:
      ValueError: a header cannot be sent.
    """
    head = [(b":status", b"%d" % status)]
    for given, value in headers:
        name = given.lower()
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError(f"not a header: {name!r}: {value!r}")
        if name not in _OF_THE_CONNECTION:
            head.append((name, value))
    return head


def _objection(method: bytes, target: bytes, headers: Headers, limits: HttpLimits) -> Http2Refusal | None:
    if objection := _objection_to_request_line(method, target):
        return objection
    if len(headers) > _MAX_HEADERS:
        return Http2Refusal(431, f"The request has more than {_MAX_HEADERS} headers.")
    length = next((int(value) for name, value in headers if name == b"content-length"), 0)
    if length > limits.max_body_size:
        return Http2Refusal(413, f"The body is larger than {limits.max_body_size} bytes.")
    return None


def _objection_to_request_line(method: bytes, target: bytes) -> Http2Refusal | None:
    if not _TOKEN.fullmatch(method):
        return Http2Refusal(400, "The method of the request must be a word in ASCII.")
    if method != method.upper():
        return Http2Refusal(501, "Methods are spelled in capital letters.")
    if method == b"CONNECT":
        return Http2Refusal(400, "This server is no proxy, and does not serve CONNECT.")
    is_path = target.startswith(b"/") or (method == b"OPTIONS" and target == b"*")
    if not is_path or not _VISIBLE.fullmatch(target):
        return Http2Refusal(400, "The target of the request must be a path in visible ASCII characters.")
    return None
