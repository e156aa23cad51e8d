"""Offline generation: prompts in, results out, in the order of the prompts.

with LLM(model="smollm2-135m") as llm:
    for output in llm.generate(["Once upon a time", "The sea"], SamplingParams(max_tokens=64)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs

from trioserve.args import DEFAULT_MODEL, EngineArgs
from trioserve.beam_search_params import BeamSearchParams
from trioserve.frontend.arguments import check_type
from trioserve.frontend.prompts import PromptType, to_prompts
from trioserve.llm_engine import LLMEngine
from trioserve.llm_pooling import PoolingMethods
from trioserve.llm_speech import SpeechMethods
from trioserve.lora_request import LoRARequest
from trioserve.progress_bar import ProgressBar, UseTqdm
from trioserve.sampling_params import RequestOutputKind, SamplingParams
from trioserve.validators import shown

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Self

    from trioserve.frontend.adapters import Adapter
    from trioserve.frontend.control import PauseMode, WakeTag
    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.outputs import BeamSearchOutput, RequestOutput

__all__ = ["LLM"]

Conversation = Sequence[Mapping[str, Any]]
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class LLM(PoolingMethods, SpeechMethods):
    """A model, and the engine that runs it, for synchronous code.

    Works in a script, inside a running event loop (which it blocks), in a notebook and in any thread, but in
    one thread at a time. Ctrl-C ends the requests of the call in the engine and leaves the object usable.

    Owns an `LLMEngine`, which `close()` ends; see there for what happens if nobody calls it.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **engine_args: Any) -> None:
        """Find the model and start its engine; `engine_args` are the fields of `EngineArgs`.

        Raises:
          TypeError: an argument is unknown.
          InvalidConfigError: an argument is wrong.
          ModelSourceError, ModelNotSupportedError: the model cannot be had, or not be served.
          EngineStartError: the engine core did not come up.
        """
        args = EngineArgs.from_dict({"model": model, **engine_args})
        self._set_up(LLMEngine.from_engine_args(args))

    def _set_up(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        # Requests whose results nobody has fetched: id -> completions asked for. In the order of the ids.
        self._enqueued: dict[str, int] = {}
        # Results of enqueued requests that came while `generate` ran others.
        self._results: dict[str, RequestOutput] = {}

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """As the constructor, from the arguments' own class."""
        return cls.from_engine(LLMEngine.from_engine_args(args))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> Self:
        """Over an engine that runs already and has no other user. It is closed with this object."""
        llm = cls.__new__(cls)
        llm._set_up(engine)
        return llm

    # Generating

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The results of one or many prompts, in their order, each finished.

        Args:
          sampling_params: for all prompts, or one for each; by default the model's own. `output_kind` does
            not matter here, and the objects are left as they are.
          lora_request: the adapter of all prompts, or one (or None) for each.
          priority: one for each prompt.

        Raises:
          ValueError: there are not as many params, adapters or priorities as prompts; or the model does not
            generate, but pools.
          TypeError: a prompt has none of the known forms.
          InvalidRequestError: a prompt cannot be served as it is.
          EngineGenerateError: a request failed inside the engine.
          OverloadedError: the prompts are more than `max_num_queued_reqs` or `max_num_queued_tokens` allow.
          EngineDeadError: the engine core has died. If it is restarted (`engine_restart`), the next call
            waits until the new one is ready.
          ClosedError: this object was closed.

        If it raises, all of its requests are over. Requests of `enqueue` are left alone.
        """
        params = self._params_or_default(sampling_params)
        requests = _pair_up(to_prompts(prompts), params, priority, lora_request)
        return self._run(self._add_all(requests), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """The answers to one or many conversations (lists of messages with `role` and `content`).

        Args:
          template_options: `add_generation_prompt`, `continue_final_message`, `tools` and
            `chat_template_kwargs`, for the model's chat template. Tool calls in the answers stay text.

        Raises as `generate` does; InvalidRequestError also if the chat template refuses the messages.
        """
        prompts = self._render(messages, **template_options)
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, priority=priority
        )

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Start requests and return their ids, in the order of the prompts; the engine works at them from
        now on, and `wait_for_completion` fetches the results. Raises as `generate` does."""
        params = self._params_or_default(sampling_params)
        added = self._add_all(_pair_up(to_prompts(prompts), params, priority, lora_request))
        self._enqueued.update(added)
        return list(added)

    def enqueue_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        **template_options: Any,
    ) -> list[str]:
        """`enqueue` for conversations, with the options of `chat`."""
        prompts = self._render(messages, **template_options)
        return self.enqueue(prompts, sampling_params, lora_request=lora_request, priority=priority)

    def wait_for_completion(self, *, use_tqdm: UseTqdm = True) -> list[RequestOutput]:
        """The results of everything that was enqueued and not fetched yet, in the order of enqueueing.

        Raises as `generate` does, and likewise ends all of its requests. A request whose failure `generate`
        reported already is left out.
        """
        enqueued, self._enqueued = self._enqueued, {}
        return self._run(enqueued, use_tqdm)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        use_tqdm: UseTqdm = False,
        lora_request: LoRARequest | None = None,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The best continuations of one or many prompts, in their order; see `AsyncLLM.beam_search`.

        Args:
          concurrency_limit: prompts that are searched at a time; by default as many as fill the engine.

        Raises as `generate` does, and then all of its searches are over. ValueError also for a
        concurrency_limit below 1.
        """
        self._check_generates()
        check_type("params", params, BeamSearchParams)
        if concurrency_limit is None:
            max_num_seqs = self._engine.config.scheduler.max_num_seqs
            concurrency_limit = max(1, max_num_seqs // params.beam_width)
        if not isinstance(concurrency_limit, int) or concurrency_limit < 1:
            raise ValueError(f"concurrency_limit must be an integer >= 1, got {concurrency_limit!r}.")
        all_prompts = to_prompts(prompts)
        with ProgressBar(len(all_prompts), use_tqdm) as progress:
            return self._engine.beam_search(
                all_prompts,
                params,
                concurrency_limit=concurrency_limit,
                on_result=progress.advance_search,
                lora_request=lora_request,
            )

    def _check_generates(self) -> None:
        model = self._engine.model
        if model.runner != "generate":
            raise ValueError(
                f"This model does not generate: it supports {', '.join(model.tasks)}. Call LLM.embed, "
                "LLM.classify, LLM.score or LLM.encode instead."
            )

    def _params_or_default(
        self, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> SamplingParams | Sequence[SamplingParams]:
        return self.get_default_sampling_params() if params is None else params

    def _render(
        self,
        messages: Conversation | Sequence[Conversation],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[PromptType]:
        return [
            self._engine.render_chat(conversation, template_kwargs=chat_template_kwargs, **options)
            for conversation in _to_conversations(messages)
        ]

    def _add_all(self, requests: list[_Request]) -> dict[str, int]:
        """Add them all, or none. Returns id -> completions asked for."""
        self._check_generates()
        added: dict[str, int] = {}
        try:
            for request in requests:
                request_id = str(next(self._ids))
                self._engine.add_request(
                    request_id,
                    request.prompt,
                    request.params,
                    request.priority,
                    lora_request=request.lora_request,
                )
                added[request_id] = request.params.n
        except BaseException:
            self._engine.abort_request(added)
            raise
        return added

    def _run(self, requests: dict[str, int], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Step until these are done; their results in the order of `requests`. Aborts them if it raises."""
        remaining = requests.keys() - self._results.keys()
        try:
            with ProgressBar(sum(requests.values()), use_tqdm) as progress:
                for name in requests.keys() - remaining:
                    progress.advance(self._results[name])
                while remaining and self._engine.has_unfinished_requests():
                    for output in filter(_is_finished, self._engine.step()):
                        self._results[output.request_id] = output
                        if output.request_id in remaining:
                            remaining.remove(output.request_id)
                            progress.advance(output)
        except BaseException:
            self._engine.abort_request(requests)
            for name in requests:
                self._results.pop(name, None)
            raise
        return [self._results.pop(name) for name in requests if name in self._results]

    # LoRA adapters, and steering: see the same methods of `AsyncLLM`

    def load_lora(self, lora_request: LoRARequest) -> None:
        """Let requests have this adapter, which they may then name without its path."""
        self._engine.load_lora(lora_request)

    def unload_lora(self, name: str) -> None:
        self._engine.unload_lora(name)

    def list_loras(self) -> Sequence[Adapter]:
        return self._engine.list_loras()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes. False, and nothing done, while requests run (unless they are reset)."""
        return self._engine.reset_prefix_cache(reset_running_requests)

    def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Compute nothing until `resume_generation`; who waits for a result meanwhile waits that long."""
        self._engine.pause_generation(mode, clear_cache)

    def resume_generation(self) -> None:
        self._engine.resume_generation()

    def is_paused(self) -> bool:
        return self._engine.is_paused()

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, and give memory back: with level 1 the KV cache's, with level 2 that of the weights too."""
        self._engine.sleep(level, mode)

    def wake_up(self, tags: Iterable[WakeTag] | None = None) -> None:
        self._engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self._engine.is_sleeping()

    def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until the engine has no request. Raises TimeoutError after `drain_timeout` seconds."""
        self._engine.wait_for_requests_to_drain(drain_timeout)

    # The rest

    def get_tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses if it is given none: the model's generation config over our defaults."""
        return self._engine.get_default_sampling_params()

    def close(self) -> None:
        """Abort what runs and end the engine. Again is fine, and does nothing."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        model = self._engine.model
        return (
            f"<LLM {self._engine.config.model.model!r}: {model.architecture}, {model.precision}, "
            f"max_model_len {model.max_model_len}{', closed' if self._engine.closed else ''}>"
        )


@attrs.frozen
class _Request:
    prompt: PromptType
    params: SamplingParams
    priority: int
    lora_request: LoRARequest | None


def _to_conversations(messages: Conversation | Sequence[Conversation]) -> Sequence[Conversation]:
    is_one = bool(messages) and isinstance(messages[0], Mapping)
    return cast("Sequence[Conversation]", [messages] if is_one else messages)


def _pair_up(
    prompts: Sequence[PromptType],
    params: SamplingParams | Sequence[SamplingParams],
    priorities: Sequence[int] | None,
    lora_requests: LoRARequests,
) -> list[_Request]:
    """Each prompt with its own params, made final-only in a copy, its priority and its adapter."""
    all_params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    all_priorities = [0] * len(prompts) if priorities is None else priorities
    adapters = (
        [lora_requests] * len(prompts)
        if lora_requests is None or isinstance(lora_requests, LoRARequest)
        else lora_requests
    )
    for name, values in (("params", all_params), ("priorities", all_priorities), ("lora_request", adapters)):
        if not isinstance(values, Sequence):
            raise TypeError(f"{name} must be a list, one for each prompt, got {shown(values)}.")
        if len(values) != len(prompts):
            raise ValueError(
                f"The lengths of prompts ({len(prompts)}) and {name} ({len(values)}) must be the same."
            )
    for own in all_params:
        check_type("sampling_params", own, SamplingParams)
    return [
        _Request(prompt, attrs.evolve(own, output_kind=RequestOutputKind.FINAL_ONLY), priority, adapter)
        for prompt, own, priority, adapter in zip(prompts, all_params, all_priorities, adapters, strict=True)
    ]


def _is_finished(output: RequestOutput) -> bool:
    return output.finished
