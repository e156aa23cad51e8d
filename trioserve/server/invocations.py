"""POST /invocations: one path for all, as SageMaker wants it; the body says what is meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from trioserve.errors import InvalidRequestError
from trioserve.server.model_routes import Handler, hand_over
from trioserve.server.served_models import ServedModels
from trioserve.server.service import Service

if TYPE_CHECKING:
    from quart import Response

__all__ = ["Invocations"]


@attrs.frozen(eq=False)
class Invocations:
    """Hands a request over to the handler of the first field that it has, which reads the body anew."""

    _models: ServedModels
    _handlers: Mapping[Service, Mapping[str, Handler]]
    """Model -> field -> who serves requests with it."""

    async def create(self) -> Response:
        """Of several models it is the one that the body names, else the first that serves such a field."""
        fields = _fields(await self._models.services[0].peek_at_body())
        able = [each for each, handlers in self._handlers.items() if not handlers.keys().isdisjoint(fields)]
        if not able:
            raise self._nothing_for(fields)
        service = self._models.pick(_text(fields.get("model")), able)
        handlers = self._handlers[service]
        handler = handlers[next(field for field in handlers if field in fields)]
        if self._models.only is not None:
            return await handler()
        return await hand_over(service, handler, is_guarded=True)

    def _nothing_for(self, fields: Mapping[str, Any]) -> InvalidRequestError:
        if "input" in fields:
            return InvalidRequestError(
                "input is not served here: responses are made by POST /v1/responses.", parameter="input"
            )
        served = list(dict.fromkeys(field for handlers in self._handlers.values() for field in handlers))
        return InvalidRequestError(
            f"The body must have one of {', '.join(served)}: nothing else is served here.",
            parameter=next(iter(served), None),
        )


def _text(value: msgspec.Raw | None) -> str | None:
    """None also for what is no text."""
    try:
        return None if value is None else msgspec.json.decode(value, type=str)
    except msgspec.DecodeError:
        return None


def _fields(body: bytes) -> Mapping[str, msgspec.Raw]:
    """The keys of an object, whose values are passed over."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"The body is not a JSON object: {error}.") from None
