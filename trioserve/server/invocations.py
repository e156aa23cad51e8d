"""POST /invocations: one path for all, as SageMaker wants it; the body says what is meant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from trioserve.errors import InvalidRequestError
from trioserve.server.service import Service

if TYPE_CHECKING:
    from quart import Response

__all__ = ["Invocations"]

Handler = Callable[[], Awaitable["Response"]]


@attrs.frozen(eq=False)
class Invocations:
    """Hands a request over to the handler of the first field that it has, which reads the body anew."""

    _service: Service
    _handlers: Mapping[str, Handler]
    """Field -> who serves requests with it."""

    async def create(self) -> Response:
        fields = _fields(await self._service.peek_at_body())
        for field, handler in self._handlers.items():
            if field in fields:
                return await handler()
        if "input" in fields:
            raise InvalidRequestError(
                "input is not served here: responses are made by POST /v1/responses.", parameter="input"
            )
        raise InvalidRequestError(
            f"The body must have one of {', '.join(self._handlers)}: nothing else is served here.",
            parameter=next(iter(self._handlers)),
        )


def _fields(body: bytes) -> Mapping[str, Any]:
    """The keys of an object, whose values are passed over."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"The body is not a JSON object: {error}.") from None
