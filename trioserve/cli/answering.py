"""What `trioserve serve` does with engines that are ready: HTTP, and what belongs to it.

Apart from `serve`, because it takes longer to import than all the rest: that is done while the engines start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.nurseries import end_nursery
from trioserve.server.app import create_app
from trioserve.server.http import HttpLimits, serve_http
from trioserve.server.listeners import start_listening
from trioserve.server.request_scope import GRACE
from trioserve.server.responses.background import open_background
from trioserve.server.responses.home import ResponsesHome, open_response_store
from trioserve.settling import settle

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from trioserve.async_llm import AsyncLLM
    from trioserve.server.request_scope import App
    from trioserve.server.tls import Certificates
    from trioserve.server_args import ServerArgs

__all__ = ["answer_requests"]


async def answer_requests(
    llms: Sequence[AsyncLLM],
    listener: socket.socket,
    args: ServerArgs,
    *,
    certificates: Certificates | None,
    drain: trio.Event,
    on_ready: Callable[[], None],
) -> None:
    """Answer what comes, until `drain` is set and what ran then has ended.

    on_ready: called once clients can connect.

    Raises:
      InvalidConfigError: the file for responses cannot be used.
    """
    async with (
        open_response_store(args) as store,
        open_background(args.responses_max_background) as background,
    ):
        home = ResponsesHome(store, background)
        app = create_app(llms, args, is_draining=drain.is_set, responses=home)
        start_listening(listener, args)
        on_ready()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, settle)
            nursery.start_soon(_close, app, drain, args.shutdown_timeout)
            await serve_http(
                app,
                [listener],
                _limits(args, app),
                shutdown=drain,
                certificates=certificates,
                count_refusal=app.count_refusal,
                access_log=llms[0].config.log.access,
            )
            await background.wait_idle()
            end_nursery(nursery)


async def _close(app: App, drain: trio.Event, seconds: float) -> None:
    await drain.wait()
    app.end_requests(trio.current_time() + seconds)


def _limits(args: ServerArgs, app: App) -> HttpLimits:
    """Requests are ended by the application, which can tell their clients; the loop ends what is left.
    Likewise with bodies: the application knows which path takes how much."""
    limits = HttpLimits.from_args(args)
    shutdown_timeout = limits.shutdown_timeout + GRACE
    return attrs.evolve(limits, shutdown_timeout=shutdown_timeout, max_body_size=app.max_body_size)
