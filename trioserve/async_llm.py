"""The engine inside a trio program.

    async with AsyncLLM.from_engine_args(EngineArgs(model="smollm2-135m")) as llm:
        async with llm.stream("Once upon a time", SamplingParams(max_tokens=64)) as outputs:
            async for output in outputs:
                print(output.outputs[0].text)

A request is a scope: leaving `stream` by any path (its end, a break, an exception, a cancellation) ends the
request in the engine, at the next step, and frees its memory.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
import uuid
from array import array
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import attrs
import trio

from trioserve.errors import ClosedError, EngineDeadError, InvalidRequestError, TrioserveError
from trioserve.frontend.channel import OutputChannel
from trioserve.frontend.chat_template import ChatTemplate
from trioserve.frontend.completion import Completion
from trioserve.frontend.input_processor import InputProcessor, check_routing
from trioserve.frontend.output_processor import OutputProcessor
from trioserve.frontend.prompts import TextPrompt
from trioserve.frontend.tokenizer import Tokenizer
from trioserve.link.messages import Add, MessageError
from trioserve.link.open_client import open_client
from trioserve.model_sources import resolve_model
from trioserve.nurseries import end_nursery, ungrouped
from trioserve.observability.metrics import EngineMetrics
from trioserve.observability.throughput_log import log_throughput
from trioserve.sampling_params import RequestOutputKind, SamplingParams

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
    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.frontend.chat_template import ChatOptions
    from trioserve.frontend.input_processor import TokenizedPrompt
    from trioserve.frontend.prompts import PromptType
    from trioserve.link.client import EngineCoreClient
    from trioserve.link.messages import Ready
    from trioserve.outputs import RequestOutput

__all__ = ["AsyncLLM", "RequestStream"]

log = logging.getLogger(__name__)
request_log = logging.getLogger("trioserve.requests")


class AsyncLLM:
    """An engine core, and everything that runs beside it, as one async context manager.

    Entering finds the model (which may download it), starts the core and waits until it is ready. While it
    is open it runs two tasks: a reader that routes step outputs to the requests' channels, and a log of the
    throughput. Leaving it ends the core's process; requests that are still open then get `ClosedError`.

    If the core dies, every request under way raises `EngineDeadError`, as does every new one; the program
    around it goes on, and decides.
    """

    model: ResolvedModel
    """Where the model is and what it is. Set on entering, as are the next three."""
    tokenizer: Tokenizer
    ready: Ready
    """What the engine core reported: the cache's size, its version."""
    metrics: EngineMetrics
    _outputs: OutputProcessor
    _inputs: InputProcessor

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._client: EngineCoreClient | None = None
        self._chat_template: ChatTemplate | None = None
        self._dead_error: EngineDeadError | None = None
        self._died = trio.Event()
        self._stack = AsyncExitStack()
        self._sequence_ids = itertools.count(1)
        self._seeds = random.Random(config.model.seed)

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
        closed = ClosedError("The AsyncLLM was closed while the request was running.")
        if self._client is not None:
            self._client.end(closed)
        self._client = None
        self._outputs.fail_all(closed)
        with ungrouped():
            await self._stack.aclose()

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        self.model = await trio.to_thread.run_sync(resolve_model, self.config.model)
        self.metrics = EngineMetrics(self.config.model.served_model_names[0], self.model.max_model_len)
        self._outputs = OutputProcessor(self.metrics)
        loaded = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._load_tokenizer, loaded)  # while the core starts
            async with open_client(self.config, self.model) as client:
                await loaded.wait()
                self._client, self.ready = client, client.ready
                log.info(
                    "engine ready: %d KV blocks of %d tokens (%.1f GiB), loaded in %.1f s",
                    self.ready.num_blocks,
                    self.ready.block_size,
                    self.ready.kv_cache_bytes / 2**30,
                    self.ready.load_seconds,
                )
                async with trio.open_nursery() as tasks:
                    tasks.start_soon(self._read_outputs, client)
                    tasks.start_soon(log_throughput, self.metrics, self.config.log.stats_interval)
                    yield
                    end_nursery(tasks)

    async def _load_tokenizer(self, loaded: trio.Event) -> None:
        self.tokenizer = await trio.to_thread.run_sync(
            Tokenizer.from_directory, self.model.tokenizer_directory
        )
        self._inputs = InputProcessor(self.model, self.tokenizer)
        if self.tokenizer.chat_template is not None:
            self._chat_template = ChatTemplate(
                self.tokenizer.chat_template,
                bos_token=self.tokenizer.bos_token,
                eos_token=self.tokenizer.eos_token,
            )
        loaded.set()

    async def _read_outputs(self, client: EngineCoreClient) -> None:
        """The one task that reads the link. It waits for nothing but the socket."""
        try:
            while True:
                client.abort(self._outputs.process(await client.receive()))
                await trio.lowlevel.checkpoint()  # stay fair when the socket always has more
        except EngineDeadError as error:
            self._die(error)
        except MessageError as error:
            self._die(EngineDeadError(f"The engine core sent something unreadable: {error}"))

    def _die(self, error: EngineDeadError) -> None:
        log.error("%s", error)
        self._dead_error = error
        self._died.set()
        if self._client is not None:
            self._client.end(error)
        self.metrics.record_death()
        self._outputs.fail_all(error)

    # Requests

    def stream(
        self,
        prompt: PromptType,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """A request as a scope, and its outputs as they come: `async with llm.stream(...) as outputs`.

        Args:
          request_id: a name for `abort` and for the outputs; made up if not given, and need not be unique.
          cache_salt: prefix cache blocks are shared only among requests with the same salt.

        Entering it raises:
          InvalidRequestError: prompt or parameters cannot be served by this model.
          EngineDeadError: the engine core is gone.
          OverloadedError: the engine core is too far behind to take it.
        """
        submit = partial(
            self.submit, prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt
        )
        return RequestStream(submit, self.release)

    async def complete(
        self, prompt: PromptType, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestOutput:
        """The whole result. Cancelling it ends the request in the engine. Raises as `stream` does."""
        params = attrs.evolve(params or SamplingParams(), output_kind=RequestOutputKind.FINAL_ONLY)
        async with self.stream(prompt, params, request_id=request_id) as outputs:
            return await anext(outputs)

    async def generate(
        self, prompt: PromptType, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM has it: an async generator. Prefer `stream`: a generator that was begun and not exhausted
        ends its request only when it is closed, and nobody closes it on a `break`."""
        channel = await self.submit(prompt, sampling_params, request_id=request_id)
        try:
            while not channel.exhausted:
                yield await channel.take()
        finally:
            self.release(channel)  # synchronous: there is nothing to await in a generator's finally

    async def submit(
        self,
        prompt: PromptType,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> OutputChannel:
        """Start a request and return its channel, which the caller must `release`. Raises as `stream` does.

        For those who need many requests in one task; anybody else uses `stream`. Cancelling it leaves
        nothing behind: the request is registered and sent after the last checkpoint.
        """
        arrival_time = time.monotonic()
        params = params or SamplingParams()
        self._check_open()
        check_routing(priority, cache_salt)
        tokenized = await self._inputs.tokenize(prompt)
        params = self._inputs.fit_params(params, len(tokenized.token_ids))
        client = self._check_open()  # it may have died meanwhile
        name = request_id or f"req-{uuid.uuid4().hex}"
        channel = self._open_channel(tokenized, params, name, arrival_time)
        sequences = {next(self._sequence_ids): completion for completion in channel.completions}
        prompt_token_ids = array("i", tokenized.token_ids).tobytes()
        self._outputs.register(channel, sequences)
        try:
            for sequence_id, completion in sequences.items():
                client.add(
                    Add(
                        request_id=sequence_id,
                        prompt_token_ids=prompt_token_ids,
                        params=attrs.evolve(params, n=1),
                        seed=self._seed(params, completion.index),
                        streams=channel.streams,
                        priority=priority,
                        cache_salt=cache_salt,
                    )
                )
        except BaseException:
            self.release(channel)
            raise
        return channel

    def release(self, channel: OutputChannel) -> None:
        """End a request of `submit`: forget it here, and abort it in the engine if it runs. Not a checkpoint.
        A second call does nothing."""
        self._abort_sequences(self._outputs.release(channel))

    def abort(self, request_id: str | Iterable[str]) -> None:
        """End every request of that name (or names) with finish reason "abort". Not a checkpoint.

        Whoever reads such a request gets a last output, with what has come of it: nothing, where only the
        end was asked for (`FINAL_ONLY`)."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            self._abort_sequences(self._outputs.abort(name))

    def _abort_sequences(self, sequence_ids: list[int]) -> None:
        if self._client is not None:
            self._client.abort(sequence_ids)

    def _open_channel(
        self, prompt: TokenizedPrompt, params: SamplingParams, request_id: str, arrival_time: float
    ) -> OutputChannel:
        if self.config.log.requests:
            request_log.info("%s: %d prompt tokens, %r", request_id, len(prompt.token_ids), params)
        completions = [
            Completion(index, params, self.tokenizer, prompt.token_ids) for index in range(params.n)
        ]
        return OutputChannel(
            request_id,
            prompt.text,
            prompt.token_ids,
            completions,
            kind=params.output_kind,
            # A stop string can be found only where the text is made.
            streams=params.output_kind is not RequestOutputKind.FINAL_ONLY or bool(params.stop),
            arrival_time=arrival_time,
        )

    def _seed(self, params: SamplingParams, index: int) -> int:
        """Of n completions, number i is what a request of its own with seed + i would give."""
        return self._seeds.getrandbits(63) if params.seed is None else params.seed + index

    # Chat

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> TextPrompt:
        """The prompt for a conversation, by the model's chat template. A checkpoint.

        Raises:
          InvalidRequestError: the model has no chat template, or it refuses the messages.
        """
        await trio.lowlevel.checkpoint()
        self._check_open()
        if self._chat_template is None:
            raise InvalidRequestError(
                f"{self.config.model.served_model_names[0]} has no chat template; use completions instead.",
                parameter="messages",
            )
        return TextPrompt(self._chat_template.render(messages, **options), add_special_tokens=False)

    # State

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    @property
    def is_running(self) -> bool:
        """Open, and the engine core alive."""
        return self._client is not None and self._dead_error is None

    @property
    def errored(self) -> bool:
        """The engine core has died."""
        return self._dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._dead_error

    @property
    def num_open_requests(self) -> int:
        """Requests whose scope is open."""
        return self._outputs.num_requests

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine core has died; never returns if it does not."""
        await self._died.wait()
        assert self._dead_error is not None
        return self._dead_error

    async def check_health(self) -> None:
        """A round trip to the engine core.

        Raises:
          EngineDeadError: it is gone.
        """
        await self._check_open().call("ping")

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while a request runs."""
        return bool(await self._check_open().call("reset_prefix_cache"))

    def _check_open(self) -> EngineCoreClient:
        if self._dead_error is not None:
            raise EngineDeadError(*self._dead_error.args)
        if self._client is None:
            raise ClosedError("The AsyncLLM is not open: use it inside `async with`.")
        return self._client


class RequestStream:
    """One request: an async context manager that gives an async iterator of its outputs.

    The iterator ends after the output whose `finished` is true. Each step is a checkpoint; a cancellation
    loses no output. Iterating after the engine core has died raises EngineDeadError.
    """

    def __init__(
        self, submit: Callable[[], Awaitable[OutputChannel]], release: Callable[[OutputChannel], None]
    ) -> None:
        self._submit = submit
        self._release = release
        self._channel: OutputChannel | None = None

    async def __aenter__(self) -> Self:
        if self._channel is not None:
            raise ClosedError("A stream can be entered once.")
        self._channel = await self._submit()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Not a checkpoint: it must work, and work at once, in a cancelled scope."""
        if self._channel is not None:
            self._release(self._channel)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._channel is None:
            raise ClosedError("The stream is not open: use it inside `async with`.")
        if self._channel.exhausted:
            raise StopAsyncIteration
        return await self._channel.take()
