"""What this task works for: an HTTP request, or a WebSocket's handshake."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import quart
from quart import has_request_context

if TYPE_CHECKING:
    from quart.wrappers.base import BaseRequestWebsocket

__all__ = ["current_request"]


def current_request() -> BaseRequestWebsocket:
    """Its path, headers and query.

    Raises:
      RuntimeError: the task works for neither.
    """
    return cast("BaseRequestWebsocket", quart.request if has_request_context() else quart.websocket)
