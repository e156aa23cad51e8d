"""GET /metrics and /version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
from prometheus_client.registry import Collector
from quart import Response

from trioserve.observability.metrics import EngineMetrics
from trioserve.observability.together import render_together
from trioserve.server.replies import json_reply
from trioserve.version import __version__

if TYPE_CHECKING:
    from typing import Self

    from trioserve.server.served_models import ServedModels

__all__ = ["Metrics", "tell_version"]


@attrs.frozen(eq=False)
class Metrics:
    """The metrics of all engines as Prometheus text."""

    _collectors: Sequence[Collector]

    @classmethod
    def of(cls, models: ServedModels, counts: Collector) -> Self:
        """`counts` are those of the server; if they are an engine's own, they come once."""
        metrics = [service.llm.metrics for service in models.services]
        return cls(metrics if counts in metrics else [*metrics, counts])

    async def render(self) -> Response:
        return Response(render_together(self._collectors), content_type=EngineMetrics.content_type)


async def tell_version() -> Response:
    return json_reply({"version": __version__})
