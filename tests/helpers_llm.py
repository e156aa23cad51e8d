"""A stand-in for AsyncLLM whose engine is a script: what the synchronous shells are tested against."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Self, cast

import trio
import trio.testing

from trioserve.args import EngineArgs
from trioserve.config import GenerationDefaults, ResolvedModel
from trioserve.errors import ClosedError, EngineDeadError, EngineGenerateError, InvalidRequestError
from trioserve.frontend.prompts import TextPrompt, parse_prompt
from trioserve.llm import LLM
from trioserve.llm_engine import LLMEngine
from trioserve.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    FinishReason,
    RequestOutput,
)
from trioserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trioserve.async_llm import AsyncLLM
    from trioserve.beam_search_params import BeamSearchParams

MODEL = ResolvedModel(
    directory="/models/scripted",
    tokenizer_directory="/models/scripted",
    architecture="ScriptedForCausalLM",
    dtype="float32",
    vocab_size=100,
    context_length=4096,
    max_model_len=1024,
    eos_token_ids=(0,),
    generation=GenerationDefaults(temperature=0.25, top_k=7, max_new_tokens=99),
)


class ScriptedChannel:
    """Takes the place of `trioserve.frontend.channel.OutputChannel`."""

    def __init__(self, request_id: str, prompt: str, params: SamplingParams) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.watcher: Callable[[], None] | None = None
        self.exhausted = False
        self._items: deque[RequestOutput | Exception] = deque()

    @property
    def has_news(self) -> bool:
        return bool(self._items)

    def put(self, item: RequestOutput | Exception) -> None:
        self._items.append(item)
        if self.watcher is not None:
            self.watcher()

    def take_nowait(self) -> RequestOutput:
        item = self._items.popleft()
        if isinstance(item, Exception):
            self.exhausted = True
            raise item
        self.exhausted = item.finished
        if self._items and self.watcher is not None:
            self.watcher()
        return item


class ScriptedLLM:
    """The prompt says what happens; the newest request is served first.

    "refuse": submitting raises; "fail": the request fails in the engine; "die": the engine dies; "forever":
    nothing comes; "interrupt": nothing comes but Ctrl-C, while the main thread waits. Anything else is
    answered in capitals, in DELTA streams one word at a time.
    """

    def __init__(self) -> None:
        self.config = EngineArgs(model="scripted").create_engine_config()
        self.model = MODEL
        self.tokenizer = "the tokenizer"
        self.submitted: list[ScriptedChannel] = []
        self.priorities: list[int] = []
        self.open: list[ScriptedChannel] = []
        self.aborted: list[str] = []
        self.rendered: list[tuple[Any, dict[str, Any]]] = []
        self.was_closed = False
        self.searching = self.most_searching = 0
        self._new_requests = trio.lowlevel.ParkingLot()
        self._pending: list[ScriptedChannel] = []
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        nursery = await self._stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(self._serve)
        self._nursery = nursery
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self.open:
            channel.put(ClosedError("closed"))
        self._nursery.cancel_scope.cancel()
        await self._stack.aclose()
        self.was_closed = True

    async def wait_ready(self) -> None:
        await trio.lowlevel.checkpoint()

    async def submit(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        lora_request: object = None,
    ) -> ScriptedChannel:
        await trio.lowlevel.checkpoint()
        parsed = parse_prompt(prompt)
        text = parsed.text if isinstance(parsed, TextPrompt) else " ".join(map(str, parsed.token_ids))
        if text == "refuse":
            raise InvalidRequestError("prompt must be nicer.", parameter="prompt")
        channel = ScriptedChannel(request_id, text or "", params)
        self.submitted.append(channel)
        self.priorities.append(priority)
        self.open.append(channel)
        self._pending.append(channel)
        self._new_requests.unpark_all()
        return channel

    def release(self, channel: ScriptedChannel) -> None:
        if channel in self.open:
            self.open.remove(channel)
            if channel in self._pending:
                self._pending.remove(channel)
            if not channel.exhausted:
                self.aborted.append(channel.request_id)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Any = None,
        template_kwargs: Any = None,
    ) -> TextPrompt:
        await trio.lowlevel.checkpoint()
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "template_kwargs": template_kwargs,
        }
        self.rendered.append((list(messages), options))
        return TextPrompt(str(messages[-1]["content"]), add_special_tokens=False)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        await trio.lowlevel.checkpoint()
        return reset_running_requests or not self.open

    async def beam_search(
        self, prompt: Any, params: BeamSearchParams, *, lora_request: object = None
    ) -> BeamSearchOutput:
        """ "slow" takes for ever, "fail" fails; anything else is answered in capitals, the later the longer
        it is."""
        self.searching += 1
        self.most_searching = max(self.most_searching, self.searching)
        try:
            if prompt == "slow":
                await trio.sleep_forever()
            if prompt == "fail":
                raise EngineGenerateError("the search failed")
            await trio.sleep(0.001 * len(prompt))
        finally:
            self.searching -= 1
        sequence = BeamSearchSequence(
            tokens=[1],
            output_token_ids=[1],
            text=prompt.upper(),
            output_text=prompt.upper(),
            logprobs=[],
            cum_logprob=-1.0,
            score=-1.0,
            finish_reason=FinishReason.LENGTH,
        )
        return BeamSearchOutput(
            request_id="search", prompt=prompt, prompt_token_ids=[1, 2], sequences=[sequence]
        )

    async def _serve(self) -> None:
        while True:
            while not self._pending:
                await self._new_requests.park()
            await trio.lowlevel.checkpoint()
            self._answer(self._pending.pop())

    def _answer(self, channel: ScriptedChannel) -> None:
        match channel.prompt:
            case "forever":
                pass
            case "interrupt":
                self._nursery.start_soon(interrupt_the_call_that_waits)
            case "fail":
                channel.put(EngineGenerateError("the request failed"))
            case "die":
                error = EngineDeadError("the engine is gone")
                for open_channel in list(self.open):
                    open_channel.put(error)
            case _:
                for output in _outputs_of(channel):
                    channel.put(output)


async def interrupt_the_call_that_waits() -> None:
    """Ctrl-C once the main thread is in a call that waits for the engine, and not before."""
    while True:
        await trio.testing.wait_all_tasks_blocked()
        if any(task.name.endswith("_Call.run") for task in _descendants(trio.lowlevel.current_root_task())):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return
        await trio.sleep(0.001)


def _descendants(task: trio.lowlevel.Task | None) -> Iterator[trio.lowlevel.Task]:
    for nursery in [] if task is None else task.child_nurseries:
        for child in nursery.child_tasks:
            yield child
            yield from _descendants(child)


def _outputs_of(channel: ScriptedChannel) -> list[RequestOutput]:
    words = [f" {word}".upper() for word in channel.prompt.split()]
    is_delta = channel.params.output_kind is RequestOutputKind.DELTA
    parts = words if is_delta else ["".join(words)]
    return [_output(channel, part, finished=part is parts[-1]) for part in parts]


def _output(channel: ScriptedChannel, text: str, *, finished: bool) -> RequestOutput:
    completions = [
        CompletionOutput(
            index=index,
            text=text,
            token_ids=[1] * len(text.split()),
            finish_reason=FinishReason.STOP if finished else None,
        )
        for index in range(channel.params.n)
    ]
    return RequestOutput(
        request_id=channel.request_id,
        prompt=channel.prompt,
        prompt_token_ids=[2] * len(channel.prompt.split()),
        outputs=completions,
        finished=finished,
    )


def scripted_engine() -> tuple[LLMEngine, ScriptedLLM]:
    scripted = ScriptedLLM()
    return LLMEngine(cast("AsyncLLM", scripted)), scripted


def scripted_llm() -> tuple[LLM, ScriptedLLM]:
    engine, scripted = scripted_engine()
    return LLM.from_engine(engine), scripted
