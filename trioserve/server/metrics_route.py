"""GET /metrics and /version."""

from __future__ import annotations

import attrs
from quart import Response

from trioserve.server.replies import json_reply
from trioserve.server.service import Service
from trioserve.version import __version__

__all__ = ["Metrics", "tell_version"]


@attrs.frozen(eq=False)
class Metrics:
    """The engine's metrics as Prometheus text."""

    _service: Service

    async def render(self) -> Response:
        metrics = self._service.llm.metrics
        return Response(metrics.render(), content_type=metrics.content_type)


async def tell_version() -> Response:
    return json_reply({"version": __version__})
