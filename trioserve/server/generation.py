"""Running the prompts of one HTTP request in the engine, all inside the request's scope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from trioserve.async_llm import AsyncLLM
from trioserve.beam_search_params import BeamSearchParams
from trioserve.frontend.channel import OutputChannel
from trioserve.frontend.prompts import TextPrompt, TokensPrompt
from trioserve.lora_request import LoRARequest
from trioserve.outputs import CompletionOutput, RequestOutput
from trioserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from trioserve.outputs import BeamSearchOutput, BeamSearchSequence

__all__ = ["Deliver", "Generation", "Outputs", "open_outputs"]

_Item = tuple[int, RequestOutput]

Deliver = Callable[[int, RequestOutput], bool]
"""Takes what `Outputs.next` would return, and does not wait. False: it wants no more for now."""


@attrs.frozen(kw_only=True)
class Generation:
    """What is to be generated: the same parameters for every prompt."""

    prompts: Sequence[str | list[int] | TextPrompt | TokensPrompt]
    request_ids: Sequence[str]
    """One per prompt."""
    params: SamplingParams | BeamSearchParams
    cache_salt: str | None = None
    priority: int = 0
    lora: str | None = None
    """The name of an adapter that is loaded."""

    @property
    def lora_request(self) -> LoRARequest | None:
        return None if self.lora is None else LoRARequest(self.lora)


class Outputs(Protocol):
    """The outputs of all prompts, in the order in which they come."""

    async def next(self) -> tuple[int, RequestOutput]:
        """The next output and its prompt's index. Never called after the last one.

        Raises:
          TrioserveError: a prompt failed, and with it the whole response.
        """

    async def forward(self, deliver: Deliver) -> None:
        """Have `deliver` called with outputs as they come, in the task that brings them, until it returns
        False or the next one is for `next`; see `OutputChannel.forward`. Returns at once where that does not
        go."""


async def open_outputs(llm: AsyncLLM, generation: Generation, stack: AsyncExitStack) -> Outputs:
    """Submit every prompt; leaving `stack` aborts, synchronously, whatever has not ended by then.

    Other tasks run between two prompts, and a cancellation is let in: a request may have thousands.

    Raises:
      InvalidRequestError: of the first prompt that cannot be served.
    """
    params = generation.params
    if isinstance(params, BeamSearchParams):
        return _BeamSearches(llm, generation, params)
    channels: list[OutputChannel] = []
    for prompt, request_id in zip(generation.prompts, generation.request_ids, strict=True):
        if channels:
            await trio.lowlevel.checkpoint()
        channel = await llm.submit(
            prompt,
            params,
            request_id=request_id,
            cache_salt=generation.cache_salt,
            priority=generation.priority,
            lora_request=generation.lora_request,
        )
        stack.callback(llm.release, channel)
        channels.append(channel)
    return _OneChannel(channels[0]) if len(channels) == 1 else _MergedChannels(channels)


@attrs.frozen(eq=False)
class _OneChannel:
    _channel: OutputChannel

    async def next(self) -> _Item:
        return 0, await self._channel.take()

    async def forward(self, deliver: Deliver) -> None:
        await self._channel.forward(partial(deliver, 0))


class _MergedChannels:
    """Whichever has news, in the order in which they came. Nothing is taken from a channel before it is asked
    for, so a channel that has to wait merges what comes, and a cancellation loses nothing."""

    def __init__(self, channels: Sequence[OutputChannel]) -> None:
        self._channels = channels
        self._with_news: dict[int, None] = {}  # an ordered set of indices
        self._arrival = trio.lowlevel.ParkingLot()
        for index, channel in enumerate(channels):
            channel.watcher = partial(self._note, index)
            if channel.has_news:
                self._note(index)

    def _note(self, index: int) -> None:
        self._with_news[index] = None
        self._arrival.unpark_all()

    async def next(self) -> _Item:
        await trio.lowlevel.checkpoint()
        while not self._with_news:
            await self._arrival.park()
        index = next(iter(self._with_news))
        del self._with_news[index]
        return index, self._channels[index].take_nowait()

    async def forward(self, deliver: Deliver) -> None:
        """Several would have to take turns, for which they need a task."""


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
            lora_request=self._generation.lora_request,
        )
        self._num_done += 1
        return index, _found_output(found)

    async def forward(self, deliver: Deliver) -> None:
        """There is one output of each."""


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
