"""The engine inside a trio program.

    async with AsyncLLM.from_engine_args(EngineArgs(model="smollm2-135m")) as llm:
        async with llm.stream("Once upon a time", SamplingParams(max_tokens=64)) as outputs:
            async for output in outputs:
                print(output.outputs[0].text)

A request is a scope: leaving `stream` by any path (its end, a break, an exception, a cancellation) ends the
request in the engine, at the next step, and frees its memory.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import attrs
import trio

from trioserve.errors import ClosedError, TrioserveError
from trioserve.frontend.adapters import Adapters
from trioserve.frontend.admission import Admission
from trioserve.frontend.arguments import names_of, sampling_params_or_default
from trioserve.frontend.beam_search_request import run_beam_search
from trioserve.frontend.chat_renderer import ChatRenderer
from trioserve.frontend.engine_handle import EngineHandle
from trioserve.frontend.engine_slot import EngineSlot
from trioserve.frontend.input_processor import InputProcessor, Routing
from trioserve.frontend.model_tasks import check_generates
from trioserve.frontend.output_processor import OutputProcessor
from trioserve.frontend.pooling import PoolingRequests
from trioserve.frontend.pooling_handle import PoolingHandle
from trioserve.frontend.pooling_inputs import PoolingInputs
from trioserve.frontend.prompts import TextPrompt
from trioserve.frontend.request_stream import RequestStream, open_source
from trioserve.frontend.requests import Requests
from trioserve.frontend.speech_handle import SpeechHandle, make_transcriber
from trioserve.frontend.supervisor import EngineSupervisor
from trioserve.frontend.tokenizer import Tokenizer
from trioserve.link.open_client import open_client
from trioserve.model_sources import resolve_model
from trioserve.nurseries import end_nursery, ungrouped
from trioserve.observability.metrics import EngineMetrics
from trioserve.observability.throughput_log import log_throughput
from trioserve.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Iterable,
        Mapping,
        Sequence,
    )
    from types import TracebackType
    from typing import Unpack

    from trioserve.args import EngineArgs
    from trioserve.beam_search_params import BeamSearchParams
    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.frontend.adapters import Adapter
    from trioserve.frontend.channel import OutputChannel
    from trioserve.frontend.chat_template import ChatOptions
    from trioserve.frontend.prompts import PromptType
    from trioserve.frontend.request_stream import Input, Source
    from trioserve.link.client import EngineCoreClient
    from trioserve.link.messages import Ready
    from trioserve.lora_request import LoRARequest
    from trioserve.outputs import BeamSearchOutput, RequestOutput
    from trioserve.sampling_params import SamplingParams

__all__ = ["AsyncLLM", "RequestStream"]


class AsyncLLM(EngineHandle, PoolingHandle, SpeechHandle):
    """An engine core, and everything that runs beside it, as one async context manager.

    Entering finds the model (which may download it), starts the core and waits until it is ready. While it
    is open it runs two tasks: the supervisor, which owns the core and routes its step outputs to the
    requests' channels, and a log of the throughput. Leaving it ends the core's process; requests that are
    still open then get `ClosedError`.

    If the core dies, every request under way raises `EngineDeadError`. With restart "never" so does every new
    one; the program around it goes on, and decides. With "on-failure" a new core is started, and until it is
    ready new requests raise `EngineRestartingError`. It is as empty as the first one was: no prefixes are
    cached, and a pause or a sleep is over. With `requeue`, requests that had no token yet go on there.
    """

    model: ResolvedModel
    """Where the model is and what it is. Set on entering, as are the next two."""
    tokenizer: Tokenizer
    metrics: EngineMetrics
    _outputs: OutputProcessor
    _requests: Requests
    _pooling: PoolingRequests
    _supervisor: EngineSupervisor

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        super().__init__(EngineSlot(), lambda: self._requests.abort_all())  # noqa: PLW0108 - made on entering
        self._adapters = Adapters(config, self._engine.get_client)
        self._stack = AsyncExitStack()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> AsyncLLM:
        """Not started yet: enter it with `async with`.

        Raises:
          InvalidConfigError: the arguments contradict each other.
        """
        return cls(args.create_engine_config())

    # The engine's life

    async def __aenter__(self) -> Self:
        """Start.

        Raises:
          ModelSourceError, ModelNotSupportedError: the model cannot be had, or not be served.
          EngineStartError: the engine core did not come up; the text has its reason.
        """
        if hasattr(self, "model"):
            raise ClosedError("An AsyncLLM can be entered once.")
        try:
            with ungrouped():
                await self._stack.enter_async_context(self._run())
        except ExceptionGroup as group:  # the core and the tokenizer failed together: one of them will do
            known = [error for error in group.exceptions if isinstance(error, TrioserveError)]
            if not known:
                raise
            raise known[0] from group
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The body's error is its own: it passes untouched, and does not run through the nurseries in here.
        self._supervisor.close(ClosedError("The AsyncLLM was closed while the request was running."))
        with ungrouped():
            await self._stack.aclose()

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        self.model = await trio.to_thread.run_sync(resolve_model, self.config.model)
        self.metrics = EngineMetrics(self.config.model.served_model_names[0], self.model.max_model_len)
        self._outputs = OutputProcessor(self.metrics, Admission(self.config, self.metrics))
        loaded = trio.Event()
        self._supervisor = EngineSupervisor(
            config=self.config.supervision,
            slot=self._engine,
            metrics=self.metrics,
            outputs=self._outputs,
            get_requests=lambda: self._requests,
            open_core=partial(self._open_core, loaded),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._load_tokenizer, loaded)  # while the core starts
            await nursery.start(self._supervisor.run)
            nursery.start_soon(log_throughput, self.metrics, self.config.log.stats_interval)
            yield
            end_nursery(nursery)

    @asynccontextmanager
    async def _open_core(self, loaded: trio.Event) -> AsyncIterator[EngineCoreClient]:
        """A core, from the moment at which there can be requests for it."""
        async with open_client(self._adapters.for_core(self.config), self.model) as client:
            await loaded.wait()
            self._adapters.take_over(client)
            yield client

    async def _load_tokenizer(self, loaded: trio.Event) -> None:
        directory = self.model.tokenizer_directory
        self.tokenizer = await trio.to_thread.run_sync(Tokenizer.from_directory, directory)
        inputs = InputProcessor(self.config, self.model, self.tokenizer)
        self._requests = Requests(self.config, inputs, self._outputs, self.tokenizer, self._engine.get_client)
        pooling_inputs = PoolingInputs(self.config, self.model, self.tokenizer, inputs)
        self._pooling = PoolingRequests(pooling_inputs, self._requests, self.tokenizer)
        self._transcriber = make_transcriber(self.config, self.model, self._requests, self.metrics)
        self._chats = ChatRenderer(self.tokenizer, self.config.model.served_model_names[0])
        loaded.set()

    # Requests

    def stream(
        self,
        prompt: Input,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestStream:
        """A request as a scope, and its outputs as they come: `async with llm.stream(...) as outputs`.

        The deadline of the cancel scopes around it is the request's own: the scheduling policy "deadline"
        goes by it, and a request that cannot meet it may end early, with finish reason "deadline".

        Args:
          prompt: or its pieces, as an async iterable. Each is appended to all that came before (pieces and
            answers), and answered. Reading fetches the next piece once the answer to the one before has
            ended (its output has a finish reason, and `finished` is false); after the last piece, an output
            with `finished` says so. Cumulative outputs count from the present piece, and `prompt_token_ids`
            are all that was before. An async generator is closed with the scope, any other iterable is not.
            An `abort` or the engine's death shows when the next piece has come.
          request_id: a name for `abort` and for the outputs; made up if not given, and need not be unique.
          cache_salt: prefix cache blocks are shared only among requests with the same salt. By default the
            prompt's own.
          lora_request: the adapter to run with, which is loaded if it is not there and has a path.

        Entering it raises:
          InvalidRequestError: prompt or parameters cannot be served by this model. (A grammar is refused
            later, by the engine: then reading raises this.) LoRANotFoundError, which is one: there is no such
            adapter.
          EngineDeadError: the engine core is gone.
          OverloadedError: the engine core is too far behind to take it; or EngineRestartingError, which is
            one: it has died, and the next one is not ready yet.
        """
        routing = partial(self._route, priority, cache_salt, lora_request)
        return RequestStream(partial(self._open_source, prompt, params, routing, request_id))

    async def _open_source(
        self,
        prompt: Input,
        params: SamplingParams | None,
        route: Callable[[], Awaitable[Routing]],
        request_id: str | None,
    ) -> Source:
        self._engine.get_client()
        return await open_source(self._requests, prompt, params, await route(), request_id)

    async def _route(
        self, priority: int = 0, cache_salt: str | None = None, lora_request: LoRARequest | None = None
    ) -> Routing:
        """Not a checkpoint, unless an adapter has to be loaded. Raises InvalidRequestError for a model that
        generates nothing."""
        check_generates(self.model)
        adapter = await self._adapters.find(lora_request)
        return Routing(priority=priority, cache_salt=cache_salt, adapter=adapter)

    async def complete(
        self,
        prompt: PromptType,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """The whole result. Cancelling it ends the request in the engine. Raises as `stream` does."""
        params = attrs.evolve(sampling_params_or_default(params), output_kind=RequestOutputKind.FINAL_ONLY)
        async with self.stream(prompt, params, request_id=request_id, lora_request=lora_request) as outputs:
            return await anext(outputs)

    async def generate(
        self,
        prompt: Input,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM has it: an async generator. Prefer `stream`: a generator that was begun and not exhausted
        ends its request only when it is closed, and nobody closes it on a `break`."""
        route = partial(self._route, lora_request=lora_request)
        source = await self._open_source(prompt, sampling_params, route, request_id)
        try:
            while not source.exhausted:
                yield await source.take()
        finally:
            source.release()  # synchronous, and first: it must work in whatever state this is closed
            await source.aclose()

    async def beam_search(
        self,
        prompt: PromptType,
        params: BeamSearchParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> BeamSearchOutput:
        """The `beam_width` best continuations; see `trioserve.frontend.beam_search` for which those are.

        Cancelling it ends all of it in the engine. An `abort` of its name, or its deadline, ends it with the
        beams as they are then.

        Raises as `stream` does; InvalidRequestError also for structured_outputs, and for a temperature other
        than 0 or 1 where the engine's max_logprobs is not -1.
        """
        self._engine.get_client()
        return await run_beam_search(
            self._requests,
            prompt,
            params,
            await self._route(priority, cache_salt, lora_request),
            request_id=request_id,
            eos_token_ids=self.model.eos_token_ids,
        )

    async def submit(
        self,
        prompt: PromptType,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> OutputChannel:
        """Start a request and return its channel, which the caller must `release`: for those who need many
        requests in one task. Raises as `stream` does. Cancelling it leaves nothing behind: the request is
        registered and sent after the last checkpoint."""
        self._engine.get_client()
        routing = await self._route(priority, cache_salt, lora_request)
        return await self._requests.submit(prompt, params, routing, request_id=request_id)

    def check_room(self, num_sequences: int = 1) -> None:
        """Whether a request would be let in now, before anything is known of it. Not a checkpoint.

        Raises:
          InvalidRequestError: it is too large ever to be let in.
          OverloadedError: too many wait; or EngineRestartingError, which is one.
          EngineDeadError, ClosedError: there is no engine.
        """
        self._engine.get_client()
        self._outputs.admission.check(num_sequences)

    def release(self, channel: OutputChannel) -> None:
        """End a request of `submit`: forget it here, and abort it in the engine if it runs. Not a checkpoint.
        A second call does nothing."""
        self._requests.release(channel)

    def abort(self, request_id: str | Iterable[str]) -> None:
        """End every request of that name (or names) with finish reason "abort". Not a checkpoint.

        Whoever reads such a request gets a last output, with what has come of it: nothing, where only the
        end was asked for (`FINAL_ONLY`)."""
        self._requests.abort(names_of("request_id", request_id))

    # Chat

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> TextPrompt:
        """The prompt for a conversation, by the model's chat template or by one of `options`. A checkpoint.

        Raises:
          InvalidRequestError: the model has no chat template, or the template refuses the messages, is wrong,
            or takes too much time or memory.
        """
        self._engine.get_client()
        return TextPrompt(await self._chats.render(messages, **options), add_special_tokens=False)

    # LoRA adapters: see `trioserve.frontend.adapters.Adapters` for details, and for what these raise

    async def load_lora(self, lora_request: LoRARequest) -> None:
        """Let requests have this adapter; with its `load_inplace`, in place of the one that has its name."""
        await self._adapters.load(lora_request, again=lora_request.load_inplace)

    async def unload_lora(self, name: str) -> None:
        """Let no new request have it; those that have it keep it to their end."""
        await trio.lowlevel.checkpoint()
        self._adapters.unload(name)

    async def list_loras(self) -> Sequence[Adapter]:
        """Those that new requests may have, the oldest first."""
        await trio.lowlevel.checkpoint()
        return self._adapters.list()

    def has_lora(self, name: str | None) -> bool:
        """New requests may have one of this name."""
        return name is not None and self._adapters.has(name)

    # State: more of it, and how to steer the engine, is in `EngineHandle`

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    @property
    def ready(self) -> Ready:
        """What the newest engine core reported: the cache's size, its version. Set on entering."""
        return self._supervisor.ready

    @property
    def num_open_requests(self) -> int:
        """Requests whose scope is open."""
        return self._outputs.num_requests
