"""A line of a batch's input and one of its output, as OpenAI has them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import attrs
import msgspec

from trioserve.errors import TrioserveError
from trioserve.server.protocol.lists import shorten
from trioserve.validators import shown

__all__ = ["URLS", "BatchRequest", "Reply", "Result", "WrongLine", "WrongLineError", "parse_request"]

URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v2/embed", "/pooling",
    "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
"""What may be asked for: answers with one body, and nothing that outlives them."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@attrs.frozen
class BatchRequest:
    """A line that can be asked for."""

    number: int
    """Of the line."""
    custom_id: str
    url: str
    body: bytes
    """A JSON object."""


@attrs.frozen
class WrongLine:
    """Why a line was never a request."""

    code: str
    message: str
    line: int
    """Its number: a line without a custom_id has no other name."""


@attrs.frozen
class Reply:
    """What the application said."""

    status_code: int
    request_id: str
    body: msgspec.Raw


@attrs.frozen
class Result:
    """A line of the output. Invariant: one of `response` and `error` is None."""

    id: str
    custom_id: str | None
    response: Reply | None
    error: WrongLine | None

    @classmethod
    def answered(cls, request: BatchRequest, reply: Reply) -> Result:
        return cls(_new_id(), request.custom_id, reply, None)

    @classmethod
    def refused(cls, error: WrongLineError) -> Result:
        return cls(_new_id(), error.custom_id, None, error.detail)

    @property
    def is_good(self) -> bool:
        return self.response is not None and self.response.status_code == 200

    def encode(self) -> bytes:
        """With the end of line, and no other in it."""
        return msgspec.json.encode(self) + b"\n"


class WrongLineError(TrioserveError):
    """A line that cannot be asked for."""

    def __init__(self, number: int, code: str, problem: str, custom_id: str | None = None) -> None:
        super().__init__(problem)
        self.custom_id = custom_id
        self.detail = WrongLine(code, f"Line {number}: {problem}", number)


def parse_request(number: int, content: bytes) -> BatchRequest:
    """The request on a line that is not blank.

    Raises:
      WrongLineError: it is none, or one that no batch can have.
    """
    fields = _Fields(number, _object(number, content))
    if not (custom_id := fields.text("custom_id")):
        raise fields.error("invalid_line", "custom_id must not be empty.")
    fields.custom_id = custom_id
    if (method := fields.text("method")) != "POST":
        raise fields.error("invalid_method", f"method must be POST, got {shown(method)}.")
    url = fields.text("url")
    if url not in URLS:
        raise fields.error("invalid_url", f"url must be one of {', '.join(URLS)}, got {shown(url)}.")
    return BatchRequest(number, custom_id, url, fields.body())


@attrs.define
class _Fields:
    """Of a line; what is wrong with one is told with the custom_id, once that is known."""

    number: int
    _values: Mapping[str, msgspec.Raw]
    custom_id: str | None = None

    def error(self, code: str, problem: str) -> WrongLineError:
        return WrongLineError(self.number, code, problem, self.custom_id)

    def text(self, name: str) -> str:
        value = self._value(name)
        try:
            return msgspec.json.decode(value, type=str)
        except msgspec.DecodeError:
            raise self.error("invalid_line", f"{name} must be a string, got {_shown(value)}.") from None

    def body(self) -> bytes:
        body = self._value("body")
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            raise self.error("invalid_line", f"body must be an object, got {_shown(body)}.") from None
        for name in ("stream", "background"):
            if name in fields and bytes(fields[name]) == b"true":
                raise self.error(f"{name}_not_supported", f"body.{name} must not be true in a batch.")
        if bytes(fields.get("encoding_format", b"")).startswith(b'"bytes'):
            problem = "body.encoding_format must be float or base64 in a batch, whose lines are JSON."
            raise self.error("encoding_format_not_supported", problem)
        return bytes(body)

    def _value(self, name: str) -> msgspec.Raw:
        if name not in self._values:
            raise self.error("invalid_line", f"{name} is missing.")
        return self._values[name]


def _object(number: int, content: bytes) -> Mapping[str, msgspec.Raw]:
    try:
        text = (content.removeprefix(_BYTE_ORDER_MARK) if number == 1 else content).decode()
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except RecursionError:
        problem = "it is nested too deeply."
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = f"it is not a JSON object: {error}."
    raise WrongLineError(number, "invalid_json", problem)


def _shown(value: msgspec.Raw) -> str:
    """JSON as it was given."""
    return shorten(bytes(value).decode())


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
