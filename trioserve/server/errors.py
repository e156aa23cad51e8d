"""The one place that turns exceptions into OpenAI error objects."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
from quart import Quart, Response, g, has_request_context
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, RequestTimeout
from werkzeug.routing import WebsocketMismatch

from trioserve.errors import (
    ClosedError,
    EngineDeadError,
    EngineGenerateError,
    EngineRestartingError,
    InvalidRequestError,
    LoRANotFoundError,
    OverloadedError,
    PromptTooLongError,
    TrioserveError,
    UnfinishedError,
)
from trioserve.outputs import FinishReason
from trioserve.server.current_request import current_request
from trioserve.server.error_envelopes import error_object
from trioserve.server.protocol.errors import ErrorDetail
from trioserve.server.protocol.lists import shorten

if TYPE_CHECKING:
    from trioserve.outputs import CompletionOutput

__all__ = [
    "ApiError",
    "Failure",
    "body_too_large",
    "completions_not_stored",
    "deadline_exceeded",
    "describe",
    "file_too_large",
    "install_error_handler",
    "model_not_found",
    "naming",
    "not_ready",
    "origin_not_allowed",
    "public_finish_reason",
    "rate_limited",
    "rename",
    "shutting_down",
    "unauthorized",
    "unsupported_content_encoding",
    "unsupported_content_type",
]

_logger = logging.getLogger("trioserve.server")

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
TIMEOUT_ERROR = "timeout_error"
RATE_LIMIT = "requests"
"""OpenAI's type of a limit that counts requests."""


@attrs.frozen
class Failure:
    """What a client is told."""

    status: int
    detail: ErrorDetail
    headers: Mapping[str, str] = attrs.field(factory=dict)


class ApiError(TrioserveError):
    """An error that belongs to HTTP or OpenAI's API alone."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail.message)
        self.failure = failure


def model_not_found(name: str) -> ApiError:
    message = f"The model {shorten(name)} does not exist."
    return ApiError(Failure(404, ErrorDetail(message, INVALID_REQUEST, "model", "model_not_found")))


def completions_not_stored(completion_id: str | None) -> ApiError:
    wanted = "list" if completion_id is None else shorten(completion_id)
    message = f"There is no {wanted}: this server stores no chat completions, and refuses store: true."
    return ApiError(Failure(404, ErrorDetail(message, INVALID_REQUEST, None, "completions_not_stored")))


def unauthorized(*, given: bool) -> ApiError:
    message = (
        "The API key is wrong."
        if given
        else "An API key is needed, in the header 'Authorization: Bearer KEY' (or 'X-Api-Key: KEY')."
    )
    detail = ErrorDetail(message, INVALID_REQUEST, None, "invalid_api_key")
    return ApiError(Failure(401, detail, {"WWW-Authenticate": "Bearer"}))


def unsupported_content_type(content_type: str | None, *, allowed: str = "application/json") -> ApiError:
    message = f"The content type must be {allowed}, got {shorten(content_type)}."
    return ApiError(Failure(400, ErrorDetail(message, INVALID_REQUEST, None, "unsupported_content_type")))


def unsupported_content_encoding(encoding: str) -> ApiError:
    message = (
        f"The body must not be compressed or otherwise encoded, got Content-Encoding {shorten(encoding)}."
    )
    return ApiError(Failure(415, ErrorDetail(message, INVALID_REQUEST, None, "unsupported_content_encoding")))


def body_too_large(limit: int) -> ApiError:
    message = f"The body is larger than {limit} bytes."
    return ApiError(Failure(413, ErrorDetail(message, INVALID_REQUEST, None, "request_too_large")))


def origin_not_allowed(origin: str) -> ApiError:
    message = f"Pages of {shorten(origin)} may not open a WebSocket here."
    return ApiError(Failure(403, ErrorDetail(message, INVALID_REQUEST, None, "origin_not_allowed")))


def file_too_large(field: str, limit: int) -> ApiError:
    message = f"{field} must be at most {limit} bytes, got more."
    return ApiError(Failure(413, ErrorDetail(message, INVALID_REQUEST, field, "file_too_large")))


def not_ready(reason: str, models: Sequence[str] = ()) -> ApiError:
    """`reason` is one word, for `code`; it is that of these models."""
    which = f" ({', '.join(models)})" if models else ""
    message = f"The server is not ready: {reason.replace('_', ' ')}{which}."
    return ApiError(Failure(503, ErrorDetail(message, SERVER_ERROR, None, reason)))


def rate_limited(message: str, *, retry_after: float) -> ApiError:
    """`retry_after` in seconds."""
    detail = ErrorDetail(message, RATE_LIMIT, None, "rate_limit_exceeded")
    return ApiError(Failure(429, detail, _retry_after(retry_after)))


def _retry_after(seconds: float) -> dict[str, str]:
    """The header takes whole seconds; a client that waits so long has waited enough."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def deadline_exceeded() -> ApiError:
    message = "The request's deadline passed before it could be run to its end."
    return ApiError(Failure(504, ErrorDetail(message, TIMEOUT_ERROR, None, "deadline_exceeded")))


def shutting_down() -> ApiError:
    detail = ErrorDetail("The server is shutting down.", SERVER_ERROR, None, "shutting_down")
    return ApiError(Failure(503, detail))


@contextmanager
def naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Errors of these parameters (keys) name the fields (values) that the client set them by."""
    try:
        yield
    except InvalidRequestError as error:
        rename(error, fields)
        raise


def rename(error: Exception, fields: Mapping[str, str]) -> None:
    """As `naming`, of an error that was caught."""
    if not isinstance(error, InvalidRequestError):
        return
    parameter = (error.parameter or "").partition(".")[0]
    if parameter in fields:
        message = str(error)
        if message.startswith(parameter):
            message = fields[parameter] + message.removeprefix(parameter)
        error.parameter, error.args = fields[parameter], (message,)


def public_finish_reason(completion: CompletionOutput) -> str | None:
    """OpenAI's spelling, and vLLM's "repetition".

    Raises:
      EngineGenerateError, ApiError: the completion did not end by itself; a part of an answer must not look
        like a whole one.
    """
    reason = completion.finish_reason
    if (error := _ended_by(reason)) is not None:
        raise error
    return None if reason is None else str(reason)


def _ended_by(reason: FinishReason | None) -> TrioserveError | None:
    """What is told of a request that did not end by itself; None: it did, or has not ended."""
    match reason:
        case FinishReason.ABORT:
            detail = ErrorDetail("The request was aborted by the server.", SERVER_ERROR, None, "aborted")
            return ApiError(Failure(503, detail))
        case FinishReason.ERROR:
            return EngineGenerateError("the completion ended with an error")
        case FinishReason.DEADLINE:
            return deadline_exceeded()
        case _:
            return None


def describe(error: Exception) -> Failure:
    """What a client is told about `error`. Unforeseen ones are logged here, and hidden from clients."""
    if isinstance(error, UnfinishedError) and error.reason is not FinishReason.ERROR:
        error = _ended_by(error.reason) or error
    match error:
        case ApiError():
            return error.failure
        case PromptTooLongError():
            # Clients look for this code to shorten their prompt and try again.
            param = "messages" if "/chat/completions" in current_request().path else error.parameter
            return Failure(400, ErrorDetail(str(error), INVALID_REQUEST, param, "context_length_exceeded"))
        case LoRANotFoundError():
            param = "model" if error.parameter == "lora_request" else error.parameter
            return Failure(404, ErrorDetail(str(error), INVALID_REQUEST, param, "model_not_found"))
        case InvalidRequestError():
            return Failure(400, ErrorDetail(str(error), INVALID_REQUEST, error.parameter))
        case HTTPException():
            return _describe_http(error)
        case _:
            return _describe_server_error(error)


def _describe_server_error(error: Exception) -> Failure:
    match error:
        case EngineDeadError():
            return Failure(500, ErrorDetail("The engine has died.", SERVER_ERROR, None, "engine_dead"))
        case ClosedError():
            return shutting_down().failure
        case EngineRestartingError():
            detail = ErrorDetail("The engine is restarting.", SERVER_ERROR, None, "engine_restarting")
            return Failure(503, detail, _retry_after(error.retry_after))
        case OverloadedError():
            detail = ErrorDetail(str(error), SERVER_ERROR, None, "overloaded")
            return Failure(503, detail, _retry_after(error.retry_after))
        case EngineGenerateError():
            _logger.error("a request failed in the engine: %s", error)
            return Failure(500, ErrorDetail("The request failed in the engine.", SERVER_ERROR))
        case _:
            _logger.error("unexpected error", exc_info=error)
            return Failure(500, ErrorDetail("Internal server error", SERVER_ERROR))


_MAX_METHOD, _MAX_PATH = 20, 200
"""Characters of them that an error repeats."""


def _describe_http(error: HTTPException) -> Failure:
    """Of what Quart raises before, or instead of, a handler of ours."""
    status = error.code or 500
    headers: dict[str, str] = {}
    method, path = current_request().method[:_MAX_METHOD], current_request().path[:_MAX_PATH]
    code = None
    match error:
        case NotFound():
            message, code = f"Invalid URL ({method} {path})", "unknown_url"
        case MethodNotAllowed():
            headers["Allow"] = ", ".join(sorted(error.valid_methods or ()))
            message = f"{method} is not allowed on {path}; allowed: {headers['Allow']}."
            code = "method_not_supported"
        case WebsocketMismatch():
            is_plain = has_request_context()
            message = f"{path} {'is' if is_plain else 'is no'} WebSocket."
            code = "websocket_expected" if is_plain else "no_websocket"
        case RequestTimeout():
            message, code = "The body did not arrive in time.", "request_timeout"
        case _:
            message = error.description or error.name
    kind = INVALID_REQUEST if status < 500 else SERVER_ERROR
    return Failure(status, ErrorDetail(message, kind, None, code), headers)


def install_error_handler(app: Quart) -> None:
    """Every exception of a handler becomes an error object of its path's API."""

    async def answer(error: Any) -> Response:
        failure = describe(error)
        content = error_object(current_request().path, failure.status, failure.detail, g.get("request_id"))
        body = msgspec.json.encode(content)
        return Response(body, failure.status, dict(failure.headers), content_type="application/json")

    app.register_error_handler(Exception, answer)
