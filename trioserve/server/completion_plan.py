"""What a completions request has the engine do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.frontend.fill_in import FillInFormat
from trioserve.frontend.prompts import TextPrompt
from trioserve.server.generation import Generation
from trioserve.server.sampling import make_beam_search_params, make_params

if TYPE_CHECKING:
    from trioserve.async_llm import AsyncLLM
    from trioserve.beam_search_params import BeamSearchParams
    from trioserve.sampling_params import SamplingParams
    from trioserve.server.protocol.completions import CompletionRequest

__all__ = ["plan_completions"]


def plan_completions(llm: AsyncLLM, request: CompletionRequest, request_id: str) -> Generation:
    """Every prompt is a request of the engine's, `<request_id>-<prompt index>`.

    Raises:
      InvalidRequestError: it cannot be served by this model, or its fields contradict each other.
    """
    prompts = _prompts(llm, request)
    return Generation(
        prompts=prompts,
        request_ids=[f"{request_id}-{index}" for index in range(len(prompts))],
        params=_params(llm, request),
        cache_salt=request.cache_salt,
        priority=request.priority or 0,
        lora=request.model if llm.has_lora(request.model) else None,
    )


def _prompts(llm: AsyncLLM, request: CompletionRequest) -> list[TextPrompt | list[int]]:
    adds_special_tokens = request.add_special_tokens is not False
    truncation = request.truncation(llm.model.max_model_len)
    form = _fill_in_format(llm) if request.suffix else None

    def prepare(prompt: str | list[int]) -> TextPrompt | list[int]:
        if not isinstance(prompt, str):
            return prompt if truncation is None else truncation.of(prompt)
        text = prompt if form is None else form.prompt(prompt, request.suffix or "")
        return TextPrompt(text, adds_special_tokens, truncation=truncation)

    return [prepare(prompt) for prompt in request.prompts]


def _fill_in_format(llm: AsyncLLM) -> FillInFormat:
    form = FillInFormat.of(llm.tokenizer.added_tokens)
    if form is None:
        raise InvalidRequestError(
            "suffix must be null or empty: this model has no tokens that tell it of a gap.",
            parameter="suffix",
        )
    return form


def _params(llm: AsyncLLM, request: CompletionRequest) -> SamplingParams | BeamSearchParams:
    if request.use_beam_search:
        return make_beam_search_params(request, max_tokens=request.token_limit)
    logprobs = request.logprobs
    changes: dict[str, Any] = {}
    if request.chooses:
        changes["n"] = request.num_drawn
        logprobs = logprobs or 0  # they tell which are the best
    params = make_params(request, llm.model.generation, max_tokens=request.token_limit, logprobs=logprobs)
    if request.suffix:
        ends = _fill_in_format(llm).stop_token_ids(llm.tokenizer.added_tokens)
        changes["stop_token_ids"] = (*params.stop_token_ids, *ends)
    return attrs.evolve(params, **changes) if changes else params
