"""The engine for synchronous code that runs its own loop: add requests, then `step()` until none is left."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import attrs
import trio

from trioserve.async_llm import AsyncLLM
from trioserve.errors import EngineDeadError, EngineRestartingError, InvalidRequestError
from trioserve.frontend.arguments import check_request_id, check_type, names_of
from trioserve.portal import Portal
from trioserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import Any, Self, Unpack

    from trioserve.args import EngineArgs
    from trioserve.audio.limits import AudioLimits
    from trioserve.beam_search_params import BeamSearchParams
    from trioserve.config import EngineConfig, GenerationDefaults, ResolvedModel
    from trioserve.frontend.adapters import Adapter
    from trioserve.frontend.audio_intake import Audio
    from trioserve.frontend.channel import OutputChannel
    from trioserve.frontend.chat_template import ChatOptions
    from trioserve.frontend.control import PauseMode, WakeTag
    from trioserve.frontend.prompts import PromptType, TextPrompt
    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.frontend.transcription_outputs import Transcription
    from trioserve.frontend.transcription_params import TranscriptionParams
    from trioserve.lora_request import LoRARequest
    from trioserve.outputs import BeamSearchOutput, RequestOutput

__all__ = ["LLMEngine"]

T = TypeVar("T")
R = TypeVar("R")
Args = TypeVarTuple("Args")


class LLMEngine:
    """A thin synchronous shell around `AsyncLLM`, which runs in a `Portal`'s thread.

    Works in a script, inside a running event loop (which it blocks) and in any thread, but in one thread at a
    time. Ctrl-C in a method raises KeyboardInterrupt there and leaves the engine usable: requests that were
    added go on until `abort_request` or `close`, and no output is lost.

    If the engine core dies and is restarted (`engine_restart`), the requests it had raise EngineDeadError,
    and whatever comes after that waits until the new core is ready: nobody here would try again later.

    Owns: the portal's thread and, in it, the AsyncLLM with its engine process. They end by `close()`, at the
    latest when this object is collected or the main thread ends.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        """Start `llm`, which must not have been entered. Raises what entering it raises."""
        self._portal = Portal()
        try:
            self._llm = self._portal.enter(llm)
        except BaseException:
            self._portal.close()
            raise
        self._desk = _Desk(self._llm)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """Find the model and start its engine.

        Raises:
          InvalidConfigError: the arguments contradict each other.
          ModelSourceError, ModelNotSupportedError: the model cannot be had, or not be served.
          EngineStartError: the engine core did not come up.
        """
        return cls(AsyncLLM.from_engine_args(args))

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | None = None,
        priority: int = 0,
        *,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Start a request; its outputs come from `step()`. `params`: by default the model's own.

        Raises:
          InvalidRequestError: prompt or parameters cannot be served, there is no such adapter, or
            `request_id` belongs to an unfinished request.
          TypeError: the prompt has none of the known forms.
          OverloadedError: too much waits, by the limits of this engine.
          EngineDeadError: the engine core is gone.
          ClosedError: this engine was closed.
        """
        check_request_id(request_id)
        if request_id in self._desk.requests:
            raise InvalidRequestError(
                f"request_id must differ from those of unfinished requests, got {request_id!r}.",
                parameter="request_id",
            )
        params = self.get_default_sampling_params() if params is None else params
        check_type("params", params, SamplingParams)
        try:
            self._call(self._desk.submit, request_id, prompt, params, priority, lora_request)
        except BaseException:
            self.abort_request(request_id)  # it may have been submitted before Ctrl-C came
            raise

    def step(self) -> list[RequestOutput]:
        """Wait until some request has news, and return them; [] at once if no request is unfinished.

        Raises:
          EngineDeadError: the engine core is gone, and with it all unfinished requests (but those that the
            next core takes over, with `requeue_on_restart`).
          EngineGenerateError: one request failed, and is over; the next step goes on with the others.
          ClosedError: this engine was closed.
        """
        if not self._desk.requests:
            return []
        if not self._desk.has_takings:
            self._portal.call(self._desk.collect)
        return self._desk.hand_out()

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End these requests in the engine; nothing more comes of them. Unknown ids are ignored."""
        names = names_of("request_ids", request_ids)
        if not self._portal.closed:  # closing has ended them all
            self._portal.call(self._desk.abort, names)

    def has_unfinished_requests(self) -> bool:
        """True while `step()` has something to wait for or to return."""
        return bool(self._desk.requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self._desk.requests)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> TextPrompt:
        """The prompt for a conversation, by the model's chat template.

        Raises:
          InvalidRequestError: the model has no chat template, or it refuses the messages.
        """
        return self._call(functools.partial(self._llm.render_chat, messages, **options))

    def beam_search(
        self,
        prompts: Sequence[PromptType],
        params: BeamSearchParams,
        *,
        concurrency_limit: int,
        on_result: Callable[[BeamSearchOutput], None] = lambda _: None,
        lora_request: LoRARequest | None = None,
    ) -> list[BeamSearchOutput]:
        """The results of `AsyncLLM.beam_search` for each prompt, by `run_all`."""

        async def search(llm: AsyncLLM, prompt: PromptType) -> BeamSearchOutput:
            return await llm.beam_search(prompt, params, lora_request=lora_request)

        return self.run_all(search, prompts, limit=concurrency_limit, on_result=on_result)

    def run_all(
        self,
        ask: Callable[[AsyncLLM, T], Awaitable[R]],
        items: Sequence[T],
        *,
        limit: int,
        on_result: Callable[[R], None] = lambda _: None,
    ) -> list[R]:
        """`await ask(llm, item)` for each item, at most `limit` of them at a time; the results in the items'
        order. Each begins once there is an engine core, and again if that has died before it took it on.

        `on_result` is called with each result as it comes, in the engine's thread. If one fails, or Ctrl-C
        comes, all of them end; raises what the first one raised.
        """
        ask_when_ready = functools.partial(_when_ready, self._llm, functools.partial(ask, self._llm))
        return self._portal.call(_map, ask_when_ready, items, limit, on_result)

    # LoRA adapters, and steering: see the same methods of `AsyncLLM`

    def load_lora(self, lora_request: LoRARequest) -> None:
        self._call(self._llm.load_lora, lora_request)

    def unload_lora(self, name: str) -> None:
        self._call(self._llm.unload_lora, name)

    def list_loras(self) -> Sequence[Adapter]:
        return self._call(self._llm.list_loras)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return self._call(self._llm.reset_prefix_cache, reset_running_requests)

    def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        self._call(self._llm.pause_generation, mode, clear_cache)

    def resume_generation(self) -> None:
        self._call(self._llm.resume_generation)

    def is_paused(self) -> bool:
        return self._call(self._llm.is_paused)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        self._call(self._llm.sleep, level, mode)

    def wake_up(self, tags: Iterable[WakeTag] | None = None) -> None:
        self._call(self._llm.wake_up, tags)

    def is_sleeping(self) -> bool:
        return self._call(self._llm.is_sleeping)

    def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        self._call(self._llm.wait_for_requests_to_drain, drain_timeout)

    # Speech

    def transcribe(
        self,
        audios: Sequence[Audio],
        params: TranscriptionParams,
        *,
        limits: AudioLimits | None = None,
        concurrency_limit: int,
        on_result: Callable[[Transcription], None] = lambda _: None,
    ) -> list[Transcription]:
        """The results of `AsyncLLM.transcribe` for each audio, by `run_all`."""

        async def transcribe(llm: AsyncLLM, audio: Audio) -> Transcription:
            async with llm.transcribe(audio, params, limits=limits) as stream:
                return await stream.finish()

        return self.run_all(transcribe, audios, limit=concurrency_limit, on_result=on_result)

    def _call(self, afn: Callable[[*Args], Awaitable[T]], *args: *Args) -> T:
        """Run it in the loop, once there is an engine core."""
        return self._portal.call(_when_ready, self._llm, afn, *args)

    # What it is

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config and `override_generation_config` say, over our defaults."""
        return _default_sampling_params(self.model.generation)

    @property
    def config(self) -> EngineConfig:
        return self._llm.config

    @property
    def model(self) -> ResolvedModel:
        return self._llm.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    @property
    def closed(self) -> bool:
        return self._portal.closed

    def close(self) -> None:
        """Abort what runs and end the engine and its thread. Again is fine, and does nothing."""
        self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


async def _when_ready(llm: AsyncLLM, afn: Callable[[*Args], Awaitable[T]], *args: *Args) -> T:
    """`await afn(*args)`, again if the engine core has died before it took that on."""
    while True:
        await llm.wait_ready()
        try:
            return await afn(*args)
        except EngineRestartingError:
            continue


async def _map(
    afn: Callable[[T], Awaitable[R]], items: Sequence[T], limit: int, on_result: Callable[[R], None]
) -> list[R]:
    """`await afn(item)` for each item, at most `limit` at a time; the results in the items' order."""
    results: dict[int, R] = {}
    limiter = trio.CapacityLimiter(limit)

    async def run(index: int, item: T) -> None:
        async with limiter:
            results[index] = await afn(item)
        on_result(results[index])

    try:
        async with trio.open_nursery() as nursery:
            for index, item in enumerate(items):
                nursery.start_soon(run, index, item)
    except ExceptionGroup as group:  # the first failure cancels the others, so they have failed together
        raise group.exceptions[0] from None
    return [results[index] for index in range(len(items))]


def _default_sampling_params(generation: GenerationDefaults) -> SamplingParams:
    given = {name: value for name, value in attrs.asdict(generation).items() if value is not None}
    if "max_new_tokens" in given:
        given["max_tokens"] = given.pop("max_new_tokens")
    return SamplingParams(**given)


class _Desk:
    """The requests of one engine. It does not know the LLMEngine, which so can be collected while they run.

    The coroutines run in the portal's thread, one at a time, while the caller's thread waits for them; all
    else belongs to the caller's thread.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self.requests: dict[str, OutputChannel] = {}
        """Every request whose end `hand_out` has not told yet."""
        self._llm = llm
        # Taken from the channels and not handed out yet: at most what one `collect` found. They are kept
        # here, and not returned by `collect`, because Ctrl-C may lose the result of a call.
        self._outputs: list[RequestOutput] = []
        self._failures: dict[str, Exception] = {}
        # Channels whose watcher has called since the last `collect`, as an ordered set.
        self._news: dict[OutputChannel, None] = {}
        self._arrival = trio.lowlevel.ParkingLot()

    async def submit(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        priority: int,
        lora_request: LoRARequest | None,
    ) -> None:
        channel = await self._llm.submit(
            prompt, params, request_id=request_id, priority=priority, lora_request=lora_request
        )
        channel.watcher = functools.partial(self._note, channel)
        self.requests[request_id] = channel
        if channel.has_news:
            self._note(channel)

    def _note(self, channel: OutputChannel) -> None:
        self._news[channel] = None
        self._arrival.unpark_all()

    async def collect(self) -> None:
        """Wait for news and take them all. A checkpoint; cancelling it loses nothing."""
        await trio.lowlevel.checkpoint()
        while not self._news:
            await self._arrival.park()
        news, self._news = self._news, {}
        for channel in news:
            if channel.has_news:
                self._take(channel)

    def _take(self, channel: OutputChannel) -> None:
        try:
            self._outputs.append(channel.take_nowait())
        except Exception as error:
            self._failures[channel.request_id] = error  # for `hand_out` to raise
        if channel.exhausted:
            self._llm.release(channel)

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if (channel := self.requests.pop(request_id, None)) is not None:
                self._news.pop(channel, None)
                self._failures.pop(request_id, None)
                self._llm.release(channel)
        self._outputs = [output for output in self._outputs if output.request_id in self.requests]

    @property
    def has_takings(self) -> bool:
        return bool(self._outputs or self._failures)

    def hand_out(self) -> list[RequestOutput]:
        """The outputs that were taken. Before them, one by one, raises the errors: each ends its request, and
        that of an engine's death all that died with it."""
        if self._failures:
            first, error = next(iter(self._failures.items()))
            is_death = isinstance(error, EngineDeadError)
            for request_id, failure in list(self._failures.items()):
                if request_id == first or (is_death and isinstance(failure, EngineDeadError)):
                    del self._failures[request_id], self.requests[request_id]
            raise error
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            if output.finished:
                del self.requests[output.request_id]
        return outputs
