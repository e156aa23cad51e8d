"""Running the prompts of one HTTP request in the engine, all inside the request's scope."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from trioserve.async_llm import AsyncLLM
from trioserve.beam_search_params import BeamSearchParams
from trioserve.frontend.prompts import TextPrompt, TokensPrompt
from trioserve.outputs import CompletionOutput, RequestOutput
from trioserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trioserve.outputs import BeamSearchOutput, BeamSearchSequence

__all__ = ["Generation", "Outputs", "open_outputs"]

_Item = tuple[int, RequestOutput]


@attrs.frozen(kw_only=True)
class Generation:
    """What is to be generated: the same parameters for every prompt."""

    prompts: Sequence[str | list[int] | TextPrompt | TokensPrompt]
    request_ids: Sequence[str]
    """One per prompt."""
    params: SamplingParams | BeamSearchParams
    cache_salt: str | None = None
    priority: int = 0


class Outputs(Protocol):
    """The outputs of all prompts, in the order in which they come."""

    async def next(self) -> tuple[int, RequestOutput]:
        """The next output and its prompt's index. Never called after the last one.

        Raises:
          TrioserveError: a prompt failed, and with it the whole response.
        """


async def open_outputs(llm: AsyncLLM, generation: Generation, stack: AsyncExitStack) -> Outputs:
    """Submit every prompt; leaving `stack` aborts whatever has not ended by then.

    Raises:
      InvalidRequestError: of the first prompt that cannot be served.
    """
    params = generation.params
    if isinstance(params, BeamSearchParams):
        return _BeamSearches(llm, generation, params)
    streams = [
        await stack.enter_async_context(
            llm.stream(
                prompt,
                params,
                request_id=request_id,
                cache_salt=generation.cache_salt,
                priority=generation.priority,
            )
        )
        for prompt, request_id in zip(generation.prompts, generation.request_ids, strict=True)
    ]
    if len(streams) == 1:
        return _OneStream(streams[0])
    return await stack.enter_async_context(_merge(streams))


@attrs.frozen(eq=False)
class _OneStream:
    _outputs: AsyncIterator[RequestOutput]

    async def next(self) -> _Item:
        return 0, await self._outputs.__anext__()


@attrs.define(eq=False)
class _BeamSearches:
    """One after the other: each has as many sequences in the engine as it is wide."""

    _llm: AsyncLLM
    _generation: Generation
    _params: BeamSearchParams
    _num_done: int = attrs.field(init=False, default=0)

    async def next(self) -> _Item:
        index = self._num_done
        found = await self._llm.beam_search(
            self._generation.prompts[index],
            self._params,
            request_id=self._generation.request_ids[index],
            cache_salt=self._generation.cache_salt,
            priority=self._generation.priority,
        )
        self._num_done += 1
        return index, _found_output(found)


def _found_output(found: BeamSearchOutput) -> RequestOutput:
    return RequestOutput(
        request_id=found.request_id,
        prompt=found.prompt,
        prompt_token_ids=found.prompt_token_ids,
        outputs=[_found_completion(index, sequence) for index, sequence in enumerate(found.sequences)],
        finished=True,
    )


def _found_completion(index: int, sequence: BeamSearchSequence) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=sequence.output_text,
        token_ids=sequence.output_token_ids,
        cumulative_logprob=sequence.cum_logprob,
        logprobs=sequence.logprobs[: len(sequence.output_token_ids)],  # without that of a final EOS
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )


@attrs.frozen(eq=False)
class _MergedStreams:
    _channel: trio.MemoryReceiveChannel[_Item | Exception]

    async def next(self) -> _Item:
        item = await self._channel.receive()
        if isinstance(item, Exception):
            raise item
        return item


@asynccontextmanager
async def _merge(streams: Sequence[AsyncIterator[RequestOutput]]) -> AsyncIterator[Outputs]:
    """One task per stream. Nothing is buffered: a stream whose output is not taken merges the next ones."""
    send, receive = trio.open_memory_channel[_Item | Exception](0)
    async with trio.open_nursery() as nursery:
        for index, outputs in enumerate(streams):
            nursery.start_soon(_forward, index, outputs, send)
        try:
            yield _MergedStreams(receive)
        finally:
            nursery.cancel_scope.cancel()


async def _forward(
    index: int, outputs: AsyncIterator[RequestOutput], channel: trio.MemorySendChannel[_Item | Exception]
) -> None:
    # A failure must not cancel the nursery: the consumer runs inside it, and has a client to tell.
    try:
        async for output in outputs:
            await channel.send((index, output))
    except Exception as error:
        await channel.send(error)
