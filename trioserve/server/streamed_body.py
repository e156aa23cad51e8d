"""What all bodies of responses that are made as they are sent have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from quart.wrappers.response import ResponseBody

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["StreamedBody"]


class StreamedBody(ResponseBody):
    """Its own iterator, once. It owns nothing: what must end with a request belongs on the request's stack
    (`request_scope`). That is why it is a class and no async generator, which does not run its cleanup if it
    was never started."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next bytes to send."""
        raise NotImplementedError
