"""GET /health and /ping, for load balancers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.errors import ClosedError, EngineDeadError
from trioserve.server.replies import empty_reply
from trioserve.server.service import Service

if TYPE_CHECKING:
    from quart import Response

__all__ = ["Health"]

_TIMEOUT = 10.0
"""Seconds after which an engine that does not answer counts as dead."""


@attrs.frozen(eq=False)
class Health:
    """200 if the engine core answers, 503 if it is gone or stuck; no body either way."""

    _service: Service

    async def check(self) -> Response:
        with trio.move_on_after(_TIMEOUT):
            try:
                await self._service.llm.check_health()
            except (EngineDeadError, ClosedError):
                return empty_reply(503)
            return empty_reply(200)
        return empty_reply(503)
