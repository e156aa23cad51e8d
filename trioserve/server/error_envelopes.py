"""The error object that a path's clients expect: Anthropic's API has its own, all others OpenAI's."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from trioserve.server.protocol.anthropic_answers import AnthropicError, AnthropicErrorResponse
from trioserve.server.protocol.errors import ErrorResponse

if TYPE_CHECKING:
    from trioserve.server.protocol.errors import ErrorDetail

__all__ = ["anthropic_error", "error_object", "is_anthropic"]

_ANTHROPIC_PATH = "/v1/messages"

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    # Anthropic says 529, which proxies do not know; its clients try again after either, and go by the type.
    503: "overloaded_error",
    504: "timeout_error",
}

_TOO_LONG = "prompt is too long"
"""By these words clients of Anthropic's API know that a conversation has to be made shorter."""


def is_anthropic(path: str) -> bool:
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")


def error_object(
    path: str, status: int, detail: ErrorDetail, request_id: str | None = None
) -> ErrorResponse | AnthropicErrorResponse:
    """What a request to `path` (without the query) is told."""
    return anthropic_error(status, detail, request_id) if is_anthropic(path) else ErrorResponse(detail)


def anthropic_error(status: int, detail: ErrorDetail, request_id: str | None) -> AnthropicErrorResponse:
    default = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    is_too_long = detail.code == "context_length_exceeded"
    message = f"{_TOO_LONG}: {detail.message}" if is_too_long else detail.message
    return AnthropicErrorResponse(AnthropicError(_ANTHROPIC_TYPES.get(status, default), message), request_id)
