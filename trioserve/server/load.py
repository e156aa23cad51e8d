"""GET /load, for balancers that send a request where the least is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.server.replies import json_reply
from trioserve.server.request_limits import RequestLimits

if TYPE_CHECKING:
    from quart import Response

__all__ = ["Load"]


@attrs.frozen(eq=False)
class Load:
    _limits: RequestLimits

    async def tell(self) -> Response:
        """How many requests for generation are under way, whether they wait, run or are being written."""
        return json_reply({"server_load": self._limits.num_running})
