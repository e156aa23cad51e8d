"""What is decided about a request for generation before its body is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import attrs

from trioserve.async_llm import AsyncLLM
from trioserve.server.auth import client_of_request
from trioserve.server.request_limits import RequestLimits
from trioserve.server.request_scope import request_stack

if TYPE_CHECKING:
    from collections.abc import Awaitable

__all__ = ["Door"]

P = ParamSpec("P")
T = TypeVar("T")


@attrs.frozen(eq=False)
class Door:
    """Lets requests in, as far as the limits and the engine's queue allow.

    What is refused here has cost nothing but its headers.
    """

    _limits: RequestLimits
    _llm: AsyncLLM | None
    """The only engine. None if there are several: which one's queue counts is known once the body is there,
    and then looked at by who reads it (`Dispatcher`)."""
    _count_refusal: Callable[[str], None]
    """Called with the reason."""

    def guard(self, handler: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        """`handler`, of a request or a WebSocket, behind the door. Its place is its own until the last byte
        of its response, or until its client leaves.

        The guarded handler raises, beside what `handler` does:
          ApiError: the client has too many requests under way, or began too many in the last minute (429).
          OverloadedError: the server or the engine has (503).
          EngineDeadError, ClosedError: there is no engine.
        """

        @wraps(handler)
        async def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            self._let_in()
            return await handler(*args, **kwargs)

        return guarded

    def _let_in(self) -> None:
        client = client_of_request()
        if (refusal := self._limits.find_refusal(client)) is not None:
            self._count_refusal(refusal.reason)
            raise refusal.error
        if self._llm is not None:
            self._llm.check_room()
        self._limits.enter(client)
        request_stack().callback(self._limits.leave, client)
