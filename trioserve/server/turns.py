"""The next turn of a conversation: what chat completions, responses and messages have in common.

Each of these APIs makes a `ChatCompletionRequest` of its own request, and writes in its own way what the
readers of the turn say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.parsers.answer_form import AnswerForm
from trioserve.parsers.model_parsers import ModelParsers
from trioserve.parsers.parts import CallPart
from trioserve.sampling_params import SamplingParams
from trioserve.server.errors import public_finish_reason
from trioserve.server.generation import Generation, Outputs, open_outputs
from trioserve.server.sampling import make_beam_search_params, make_params
from trioserve.server.service import Service
from trioserve.server.turn_forms import answer_form, fit_params

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from trioserve.beam_search_params import BeamSearchParams
    from trioserve.outputs import CompletionOutput
    from trioserve.parsers.answer_parser import AnswerParser
    from trioserve.parsers.parts import Part
    from trioserve.parsers.reasoning_tokens import ReasoningTokens
    from trioserve.server.protocol.chat import ChatCompletionRequest

__all__ = ["AnswerReader", "Turn", "TurnPlan", "Turns"]


@attrs.frozen(kw_only=True)
class TurnPlan:
    """What is to be generated, and how it will be read."""

    generation: Generation
    form: AnswerForm


@attrs.frozen(kw_only=True, eq=False)
class Turn:
    """A turn that is being generated."""

    plan: TurnPlan
    outputs: Outputs
    readers: Sequence[AnswerReader]
    """By choice. Every output of a choice is to be read, in order."""


class AnswerReader:
    """What one choice says, as it comes."""

    def __init__(
        self,
        parser: AnswerParser,
        *,
        max_calls: int | None = None,
        reasoning_tokens: ReasoningTokens | None = None,
    ) -> None:
        """Calls beyond `max_calls` are passed over."""
        self._parser = parser
        self._reasoning_tokens = reasoning_tokens
        self._max_calls = max_calls
        self._has_more_calls = False
        self._finish_reason: str | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """So far, the marks around the reasoning included."""
        return 0 if self._reasoning_tokens is None else self._reasoning_tokens.count

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's spelling, once the answer has ended: "stop", "length", "tool_calls", or vLLM's
        "repetition". Calls that a stop string cut off are nothing to execute, and end as any text does."""
        return self._finish_reason

    def read(self, completion: CompletionOutput) -> list[Part]:
        """What an output says, in its order.

        Raises:
          EngineGenerateError, ApiError: the completion did not end by itself.
        """
        if self._reasoning_tokens is not None:
            self._reasoning_tokens.add(completion.token_ids)
        parts = list(self._parser.feed(completion.text))
        if completion.finish_reason is not None:
            parts += self._parser.finish()
            self._finish_reason = public_finish_reason(completion)
        if self._max_calls is not None:
            parts = self._first_calls(parts, self._max_calls)
        if self._finish_reason == "stop" and self._parser.has_called:
            self._finish_reason = "tool_calls"
        return parts

    def _first_calls(self, parts: Sequence[Part], max_calls: int) -> list[Part]:
        """Without the calls after them. If there are any, those that are told are whole, whatever becomes of
        the answer."""
        told = [part for part in parts if not isinstance(part, CallPart) or part.index < max_calls]
        self._has_more_calls |= len(told) < len(parts)
        if self._has_more_calls and self._finish_reason == "length":
            self._finish_reason = "tool_calls"
        return told


@attrs.frozen(kw_only=True, eq=False)
class Turns:
    """Runs turns in one engine."""

    service: Service
    trusts_templates: bool = False
    """Requests may bring their own chat template."""
    template_defaults: Mapping[str, Any] = attrs.field(factory=dict)
    """What chat templates get beside the messages, where a request does not say otherwise."""
    parsers: ModelParsers = attrs.field(factory=ModelParsers)
    """What is known of the model's answers."""
    hides_unused_tools: bool = False
    """Templates do not get tools that may not be called."""

    async def open(self, request: ChatCompletionRequest, request_id: str, stack: AsyncExitStack) -> Turn:
        """Submit the turn; leaving `stack` aborts it, synchronously, if it has not ended by then.

        Errors name the fields of chat completions: see `ChatCompletionRequest.field_names`.

        Raises:
          InvalidRequestError: it cannot be served.
          OverloadedError: too many wait.
          EngineDeadError, ClosedError: there is no engine.
        """
        self.service.llm.check_room(request.num_sequences)
        plan = await self.plan(request, request_id)
        outputs = await open_outputs(self.service.llm, plan.generation, stack)
        readers = [self._new_reader(plan.form, request) for _ in range(request.n or 1)]
        return Turn(plan=plan, outputs=outputs, readers=readers)

    def _new_reader(self, form: AnswerForm, request: ChatCompletionRequest) -> AnswerReader:
        return AnswerReader(
            form.new_parser(),
            max_calls=1 if request.parallel_tool_calls is False else None,
            reasoning_tokens=form.new_token_counter(self.service.llm.tokenizer.token_bytes),
        )

    async def plan(self, request: ChatCompletionRequest, request_id: str) -> TurnPlan:
        """What `open` would generate. Raises InvalidRequestError as it does."""
        params = self._params(request)
        prompt = await self.service.llm.render_chat(
            [message.for_template() for message in request.messages],
            add_generation_prompt=request.adds_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            tools=self._shown_tools(request),
            template_kwargs={**self.template_defaults, **request.template_kwargs},
            chat_template=self.foreign_template(request.chat_template),
        )
        form = answer_form(self.parsers, request, prompt.text)
        if isinstance(params, SamplingParams):
            params = fit_params(params, request, form)
        prompt = attrs.evolve(
            prompt,
            add_special_tokens=bool(request.add_special_tokens),
            truncation=request.truncation(self.service.llm.model.max_model_len),
        )
        generation = Generation(
            prompts=[prompt],
            request_ids=[request_id],
            params=params,
            cache_salt=request.cache_salt,
            priority=request.priority or 0,
            lora=self.service.check_model(request.model),
        )
        return TurnPlan(generation=generation, form=form)

    def _shown_tools(self, request: ChatCompletionRequest) -> list[dict[str, Any]] | None:
        if request.tools is None or (self.hides_unused_tools and request.tool_choice == "none"):
            return None
        return [tool.for_template() for tool in request.tools]

    def foreign_template(self, chat_template: str | None) -> str | None:
        """The template that a request brings. Raises InvalidRequestError if it may bring none."""
        if chat_template is not None and not self.trusts_templates:
            raise InvalidRequestError(
                "chat_template must be null: this server takes no templates from requests "
                "(--trust-request-chat-template).",
                parameter="chat_template",
            )
        return chat_template

    def _params(self, request: ChatCompletionRequest) -> SamplingParams | BeamSearchParams:
        limit = request.token_limit
        if request.use_beam_search:
            assert limit is not None, "the reader has seen to it"
            return make_beam_search_params(request, max_tokens=limit)
        defaults = self.service.llm.model.generation
        return make_params(request, defaults, max_tokens=limit, logprobs=request.num_top_logprobs)
