"""The server's application, called in this process.

A line goes through what serves the same request over HTTP (reading, checks, deadline, errors), so that the
answer is the same. Three ways lead there:

- a socket, as a client of our own server: one more loop, and headers, for nothing;
- the handlers' functions: they read the request that Quart's context holds, and what ends their work hangs on
  the request's scope, so that both would have to be made for them;
- ASGI, the interface that servers call an application by: taken, with httpx's transport, as it exists.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import httpx2
import msgspec

from trioserve.batch.lines import Reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trioserve.batch.lines import BatchRequest
    from trioserve.server.request_scope import App

__all__ = ["Application", "open_application"]


@attrs.frozen(eq=False)
class Application:
    _client: httpx2.AsyncClient

    async def ask(self, request: BatchRequest) -> tuple[Reply, float | None]:
        """The answer; and the seconds after which to ask again, if that is what it says.

        Cancellation: the request's work ends, in the engine too.
        """
        headers = {"Content-Type": "application/json"}
        response = await self._client.post(request.url, content=request.body, headers=headers)
        reply = Reply(response.status_code, response.headers["X-Request-Id"], msgspec.Raw(response.content))
        retry_after = response.headers.get("Retry-After")
        return reply, None if retry_after is None else float(retry_after)


@asynccontextmanager
async def open_application(app: App) -> AsyncIterator[Application]:
    transport: Any = httpx2.ASGITransport(app)  # type: ignore[arg-type]  # Quart types the same in other words
    async with httpx2.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:
        yield Application(client)
