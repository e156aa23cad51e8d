"""An application that counts, and requests that may be broken in many ways, for tests of the serving loop."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import attrs
import quart
import trio
from hypothesis import strategies as st

from helpers_http import DEADLINE, Gate, get
from trioserve.server.errors import install_error_handler
from trioserve.server.request_scope import App, request_stack
from trioserve.server.service import identify_requests
from trioserve.server.sse import sse_response

if TYPE_CHECKING:
    from collections.abc import Iterator


class SlowFrames:
    """Leaves time for the rest of the request to arrive."""

    def __init__(self) -> None:
        self._left = 5

    async def next_frame(self) -> bytes | None:
        await trio.sleep(0.01)
        self._left -= 1
        return b"data: slow\n\n" if self._left else None


class CountingApplication:
    """Numbers its answers, and counts the scopes of its requests."""

    def __init__(self) -> None:
        self.app = App(__name__)
        self.app.config["BODY_TIMEOUT"] = 0.5
        self.app.config["MAX_CONTENT_LENGTH"] = 5000
        install_error_handler(self.app)
        identify_requests(self.app)
        self.app.before_request(self._enter)
        self.app.after_request(self._number)
        self.app.route("/echo", methods=["GET", "POST", "PUT", "DELETE"])(self.echo)
        self.app.get("/frames")(self.frames)
        self.app.route("/slow", methods=["GET", "POST"])(self.slow)
        self.app.get("/gate")(self.stream)
        self.gate = Gate()
        self.answered = 0
        self.open = 0
        self._left = trio.lowlevel.ParkingLot()

    async def _enter(self) -> None:
        self.open += 1
        request_stack().callback(self._leave)

    def _leave(self) -> None:
        self.open -= 1
        self._left.unpark_all()

    async def wait_until_open(self, count: int) -> None:
        """Until so many requests are left."""
        with trio.fail_after(DEADLINE):
            while self.open > count:
                await self._left.park()

    async def _number(self, response: quart.Response) -> quart.Response:
        self.answered += 1
        response.headers["x-answer"] = str(self.answered)
        response.headers["x-method"] = quart.request.method
        return response

    async def echo(self) -> dict[str, str]:
        body = await quart.request.get_data()
        return {"n": quart.request.args.get("n", ""), "body": body.decode("latin-1")}

    async def frames(self) -> quart.Response:
        gate = Gate()
        gate.let(3)
        gate.end()
        return sse_response(gate)

    async def slow(self) -> quart.Response:
        response = sse_response(SlowFrames())
        response.headers["x-may-break"] = "its request may turn out to be broken"
        return response

    async def stream(self) -> quart.Response:
        return sse_response(self.gate)


@attrs.frozen
class Case:
    """What one connection sends: whole requests, then something else, in parts of these sizes."""

    num_whole: int
    rest: bytes
    parts: tuple[int, ...]

    @property
    def data(self) -> bytes:
        return b"".join(whole_request(n) for n in range(self.num_whole)) + self.rest

    def segments(self) -> Iterator[bytes]:
        data = self.data
        for size in self.parts:
            if data:
                yield data[:size]
            data = data[size:]
        if data:
            yield data


def whole_request(n: int) -> bytes:
    body = b"x" * (n * 50)
    head = b"POST /echo?n=%d HTTP/1.1\r\nhost: test\r\n" % n
    if n % 2:
        return head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


# What may go wrong in a request

METHODS = [
    b"GET",
    b"POST",
    b"HEAD",
    b"OPTIONS",
    b"TRACE",
    b"CONNECT",
    b"PUT",
    b"get",
    b"PRI",
    b"G\xc3\x89T",
    b"",
    b"(",
    b"A" * 300,
]
TARGETS = [
    b"/echo", b"/slow", b"/echo?n=1", b"/frames", b"/nowhere", b"*", b"http://test/echo", b"HTTPS://test?n=2",
    b"test:80",
    b"/%00", b"/%", b"/%ff%fe", b"//echo", b"/echo/../x", b"echo", b"?n=1", b"/\xff", b"/a b", b"/a\tb",
    b"/#x",
    b"http://", b"http:///echo", b"/" + b"a" * 3000, b"/echo?" + b"%zz&" * 50, b"/echo?n=\x00", b"",
]  # fmt: skip
VERSIONS = [
    b"HTTP/1.1",
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"HTTP/0.9",
    b"HTTP/1.2",
    b"HTTP/11",
    b"http/1.1",
    b"ICY/1.1",
    b"",
]
HEADERS = [
    b"host: test", b"host: other", b"Host : test", b"host:\x00", b"host: \xc3\xa9", b"host: [::1", b"host:",
    b"content-length: 5", b"content-length: 6", b"Content-Length: +5", b"content-length: -5",
    b"content-length: 5 ",
    b"content-length: 5, 5", b"content-length: 5, 6", b"content-length: 0x5", b"content-length: 5\x0b",
    b"content-length: 99999999999999999999999", b"content-length: ", b"content-length: 1_0",
    b"content-length: 005",
    b"content-length: \xb2", b"content-length: 9000", b"content_length: 3", b"content-length\x00: 5",
    b"transfer-encoding: chunked", b"Transfer-Encoding: Chunked", b"transfer-encoding: xchunked",
    b"transfer-encoding: gzip, chunked", b"transfer-encoding: chunked, identity",
    b"transfer-encoding:\x0bchunked",
    b"transfer-encoding: \"chunked\"", b"transfer-encoding : chunked", b"transfer-encoding:\r\n chunked",
    b"transfer-encoding: identity", b"transfer_encoding: chunked", b"te: trailers",
    b"trailer: content-length",
    b"expect: 100-continue", b"expect: 100-CONTINUE, other", b"expect: the unexpected",
    b"connection: close", b"connection: keep-alive", b"connection: upgrade, HTTP2-Settings",
    b"connection: ,,close",
    b"upgrade: h2c", b"upgrade: websocket", b"http2-settings: AAMAAABkAAQAAP__", b"http2-settings: %%%",
    b"sec-websocket-version: 13", b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==", b"keep-alive: timeout=5",
    b"x: folded\r\n line", b" folded: first", b"x: bare\rreturn", b"x: bare\nline: feed", b"no colon",
    b": no name",
    b"x: \x00", b"x: \x01\x7f\xff", b"x\xc3\xa9: y", b"x" * 2000 + b": long name", b"x: " + b"y" * 3000,
    b"content-type: application/json", b"content-type: multipart/form-data; boundary=b",
    b"content-type: \xff/",
    b"content-type: application/x-www-form-urlencoded", b"content-encoding: gzip", b"accept-encoding: \xff",
    b"cookie: a=\xff; b", b"authorization: Bearer \xff", b"authorization: Basic !",
    b"authorization: Digest a=,",
    b"x-request-id: 7", b"x-request-id: \xff", b"x-request-id: " + b"9" * 300, b"range: bytes=9-1",
    b"x-forwarded-host: \xff", b"forwarded: for=\x01", b"if-modified-since: yesterday", b"date: \xff",
    *[b"a:%d" % n for n in range(2)], b"\r\n".join(b"a:%d" % n for n in range(150)),
]  # fmt: skip
BODIES = [
    b"", b"hello", b"hello!", b"5\r\nhello\r\n0\r\n\r\n", b"5;name=value\r\nhello\r\n0\r\n\r\n",
    b"+5\r\nhello\r\n0\r\n\r\n",
    b"-5\r\nhello\r\n0\r\n\r\n", b"0x5\r\nhello\r\n0\r\n\r\n", b"5\nhello\n0\n\n",
    b"5 \r\nhello\r\n0\r\n\r\n",
    b" 5\r\nhello\r\n0\r\n\r\n", b"5;" + b"e" * 3000 + b"\r\nhello\r\n0\r\n\r\n", b"5\r\nhello0\r\n\r\n",
    b"5\r\nhelloXX0\r\n\r\n", b"00000000000000000000005\r\nhello\r\n0\r\n\r\n", b"fffffffffffffffff\r\nhello",
    b"0\r\n\r\n", b"0\r\ntrailer: x\r\n\r\n", b"0\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
    b"0\r\n bad\r\n\r\n",
    b"0\r\n\x00: \r\n\r\n", b"1\r\nx\r\n" * 400 + b"0\r\n\r\n", b"\x00" * 6000,
    b"5;\rext\r\nhello\r\n0\r\n\r\n",
    b"--b\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n1\r\n--b--\r\n", b"a=%zz&=&%ff=\xff",
    b"GET /echo?n=smuggled HTTP/1.1\r\nhost: test\r\n\r\n",
    b"0\r\n\r\nGET /echo?n=smuggled HTTP/1.1\r\nhost: test\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n",
    b"\r\n\r\nGET / HTTP/1.1\r\n",
]  # fmt: skip

odd_requests = st.builds(
    lambda method, target, version, host, headers, body, end: (
        b" ".join((method, target, version)) + end + end.join([*host, *headers, b"", b""]) + body
    ),
    st.sampled_from(METHODS[:4]) | st.sampled_from(METHODS),
    st.sampled_from(TARGETS[:5]) | st.sampled_from(TARGETS),
    st.sampled_from(VERSIONS[:1]) | st.sampled_from(VERSIONS),
    st.sampled_from([(b"host: test",), (b"host: test",), ()]),
    st.lists(st.sampled_from(HEADERS), max_size=4),
    st.sampled_from(BODIES),
    st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"]),
)

VALID = [
    whole_request(0),
    whole_request(2),
    whole_request(3),
    get("/frames"),
    get("/echo?n=5", "connection: close"),
]


def damage(data: bytes, change: tuple[str, int, int, bytes]) -> bytes:
    kind, position, length, inserted = change
    at = position % (len(data) + 1)
    piece = data[at : at + length]
    match kind:
        case "flip":
            return (
                data[:at] + bytes(byte ^ (1 << position % 8) for byte in data[at : at + 1]) + data[at + 1 :]
            )
        case "delete":
            return data[:at] + data[at + length :]
        case "duplicate":
            return data[:at] + piece + piece + data[at + length :]
        case "truncate":
            return data[:at]
        case _:
            return data[:at] + inserted + data[at:]


changes = st.tuples(
    st.sampled_from(["flip", "insert", "delete", "duplicate", "truncate"]),
    st.integers(0, 10_000),
    st.integers(1, 40),
    st.sampled_from(
        [b"\r\n", b"\n", b"\r", b" ", b"\t", b"\x00", b":", b";", b"0", b"\xff", b"\r\n\r\n", b"-"]
    )
    | st.binary(max_size=6),
)
damaged_requests = st.builds(
    lambda request, changes: reduce(damage, changes, request),
    st.sampled_from(VALID) | odd_requests,
    st.lists(changes, min_size=1, max_size=4),
)
cases = st.builds(
    Case,
    st.integers(0, 3),
    st.one_of(
        st.binary(max_size=200),
        odd_requests,
        damaged_requests,
        st.lists(odd_requests | damaged_requests | st.sampled_from(VALID), max_size=4).map(b"".join),
    ),
    st.lists(st.integers(1, 200), max_size=4).map(tuple),
)


__all__ = ["Case", "CountingApplication", "cases", "whole_request"]
