"""A request as a scope, and its outputs as an iterator."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

from trioserve.errors import ClosedError
from trioserve.frontend.prompts import PromptType
from trioserve.frontend.requests import SubmittedRequest
from trioserve.frontend.streaming_input import PromptStream, StreamedRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from trioserve.frontend.input_processor import Routing
    from trioserve.frontend.requests import Requests
    from trioserve.outputs import RequestOutput
    from trioserve.sampling_params import SamplingParams

__all__ = ["Input", "RequestStream", "Source", "open_source"]

Input: TypeAlias = PromptType | PromptStream
"""A prompt, or an async iterable of its pieces (`StreamingInput`, or prompts)."""


class Source(Protocol):
    """Where a stream's outputs come from."""

    @property
    def exhausted(self) -> bool: ...
    async def take(self) -> RequestOutput: ...
    def release(self) -> None:
        """End the request. Not a checkpoint."""

    async def aclose(self) -> None:
        """End what else it holds, after `release`. A checkpoint only where there is something."""


async def open_source(
    requests: Requests, prompt: Input, params: SamplingParams | None, routing: Routing, request_id: str | None
) -> Source:
    """Start a request. Whoever gets the source must `release` and `aclose` it. See `AsyncLLM.stream`."""
    if isinstance(prompt, AsyncIterable):
        return StreamedRequest.open(requests, prompt, params, routing, request_id=request_id)
    channel = await requests.submit(prompt, params, routing, request_id=request_id)
    return SubmittedRequest(channel, requests)


class RequestStream:
    """One request: an async context manager that gives an async iterator of its outputs.

    The iterator ends after the output whose `finished` is true. Each step is a checkpoint; a cancellation
    loses no output. Iterating after the engine core has died raises EngineDeadError.

    With streaming input, reading an output fetches the next piece where the answer to the piece before has
    ended. What fetching it raises passes through, after the request has been released.
    """

    def __init__(self, submit: Callable[[], Awaitable[Source]]) -> None:
        self._submit = submit
        self._source: Source | None = None

    async def __aenter__(self) -> Self:
        if self._source is not None:
            raise ClosedError("A stream can be entered once.")
        self._source = await self._submit()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The request ends first, and at once, also in a cancelled scope. A checkpoint only where an async
        generator of input has something to clean up."""
        if self._source is not None:
            self._source.release()
            await self._source.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._source is None:
            raise ClosedError("The stream is not open: use it inside `async with`.")
        if self._source.exhausted:
            raise StopAsyncIteration
        return await self._source.take()
