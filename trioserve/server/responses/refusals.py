"""What clients of the Responses API are told that is particular to it."""

from __future__ import annotations

from trioserve.server.errors import ApiError, Failure
from trioserve.server.protocol.errors import ErrorDetail
from trioserve.server.protocol.lists import shorten

__all__ = [
    "conversation_too_long",
    "events_not_kept",
    "item_given_twice",
    "item_not_found",
    "not_background",
    "not_served",
    "previous_not_found",
    "response_not_found",
    "still_in_progress",
]

_KIND = "invalid_request_error"


def _refusal(status: int, message: str, param: str, code: str | None = None) -> ApiError:
    return ApiError(Failure(status, ErrorDetail(message, _KIND, param, code)))


def response_not_found(response_id: str) -> ApiError:
    """The same whether it never was, is no more, or is somebody else's."""
    message = f"There is no response with the id {shorten(response_id)}."
    return _refusal(404, message, "response_id", "response_not_found")


def previous_not_found(response_id: str) -> ApiError:
    message = f"Previous response with id {shorten(response_id)} not found."
    return _refusal(400, message, "previous_response_id", "previous_response_not_found")


def still_in_progress(response_id: str) -> ApiError:
    message = f"The response {shorten(response_id)} is still being made; go on from it when it has ended."
    return _refusal(400, message, "previous_response_id", "previous_response_in_progress")


def conversation_too_long(path: str, limit: str) -> ApiError:
    message = f"{path} must refer to at most {limit}. Begin a new conversation."
    return _refusal(400, message, path, "context_length_exceeded")


def item_given_twice(item_id: str, path: str) -> ApiError:
    message = f"{path} must differ from other references, got {shorten(item_id)} again."
    return _refusal(400, message, path)


def item_not_found(item_id: str, path: str) -> ApiError:
    message = (
        f"{path}: there is no item with the id {shorten(item_id)}. Items are kept with their response, "
        "unless store was false."
    )
    return _refusal(404, message, path, "item_not_found")


def not_background(response_id: str, what: str) -> ApiError:
    message = f"The response {shorten(response_id)} was not made in the background; only those can be {what}."
    return _refusal(400, message, "response_id")


def events_not_kept(response_id: str) -> ApiError:
    """The server was ended while it was made."""
    return _refusal(400, f"The events of the response {shorten(response_id)} were lost.", "response_id")


def not_served(field: str, why: str) -> ApiError:
    return _refusal(400, f"{field} must be false or null: {why}.", field)
