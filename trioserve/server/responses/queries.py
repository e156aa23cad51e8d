"""The query parameters of the Responses API's routes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, get_args

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.server.protocol.responses_request import Includable
from trioserve.validators import shown

if TYPE_CHECKING:
    from werkzeug.datastructures import MultiDict

__all__ = ["ListQuery", "RetrieveQuery"]

_INTEGER = re.compile(r"[0-9]{1,9}")
_MAX_LIMIT = 100


@attrs.frozen
class RetrieveQuery:
    """Of GET /v1/responses/{id}."""

    streams: bool
    starting_after: int
    """-1: from the first event on."""

    @classmethod
    def of(cls, values: MultiDict[str, str]) -> RetrieveQuery:
        """Raises InvalidRequestError: a value is out of range."""
        _check_include(values)
        streams = _boolean(values, "stream")
        _boolean(values, "include_obfuscation")
        if "starting_after" not in values:
            return cls(streams, -1)
        if not streams:
            raise InvalidRequestError(
                "starting_after is only allowed when stream is true.", parameter="starting_after"
            )
        return cls(streams, _integer(values, "starting_after", "an integer >= 0"))


@attrs.frozen
class ListQuery:
    """Of GET /v1/responses/{id}/input_items."""

    limit: int
    is_descending: bool
    after: str | None
    """The id of an item."""

    @classmethod
    def of(cls, values: MultiDict[str, str]) -> ListQuery:
        """Raises InvalidRequestError: a value is out of range."""
        _check_include(values)
        limit = 20
        if "limit" in values:
            allowed = f"an integer from 1 to {_MAX_LIMIT}"
            limit = _integer(values, "limit", allowed)
            if not 1 <= limit <= _MAX_LIMIT:
                raise _wrong("limit", limit, allowed)
        order = values.get("order", "desc")
        if order not in {"asc", "desc"}:
            raise _wrong("order", order, "asc or desc")
        return cls(limit, order == "desc", values.get("after"))


def _integer(values: MultiDict[str, str], name: str, allowed: str) -> int:
    if not _INTEGER.fullmatch(values[name]):
        raise _wrong(name, values[name], allowed)
    return int(values[name])


def _boolean(values: MultiDict[str, str], name: str) -> bool:
    value = values.get(name, "false")
    if value not in {"true", "false"}:
        raise _wrong(name, value, "true or false")
    return value == "true"


def _check_include(values: MultiDict[str, str]) -> None:
    """Known ones: what there is of them is shown anyway. Clients write lists in two ways."""
    for value in [*values.getlist("include"), *values.getlist("include[]")]:
        if value not in get_args(Includable):
            raise _wrong("include", value, "one of " + ", ".join(get_args(Includable)))


def _wrong(name: str, value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {allowed}, got {shown(value)}.", parameter=name)
