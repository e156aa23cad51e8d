"""From a request's fields to `SamplingParams`: what was not given is the model's default, then ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.beam_search_params import BeamSearchParams
from trioserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from trioserve.config import GenerationDefaults
    from trioserve.server.protocol.sampling import SamplingFields

__all__ = ["make_beam_search_params", "make_params"]

_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_AS_GIVEN = (
    "n", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "allowed_token_ids", "bad_words", "repetition_detection", "logprob_token_ids",
)  # fmt: skip


def make_params(
    request: SamplingFields, defaults: GenerationDefaults, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The parameters of every prompt of `request`.

    `max_tokens` None leaves it to the model, `logprobs` None means that there are none.

    Raises:
      InvalidRequestError: the fields contradict each other, or a default of the model is out of range.
    """
    given: dict[str, Any] = {name: getattr(request, name) for name in _AS_GIVEN}
    for name in _MODEL_DEFAULTS:
        value = getattr(request, name)
        given[name] = getattr(defaults, name) if value is None else value
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=request.num_prompt_logprobs,
        structured_outputs=request.output_form,
        thinking_token_budget=None if request.thinking_token_budget == -1 else request.thinking_token_budget,
        extra_args=request.custom_args,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        **{name: value for name, value in given.items() if value is not None},
    )


def make_beam_search_params(request: SamplingFields, *, max_tokens: int) -> BeamSearchParams:
    """The parameters of a search for the `n` best answers to every prompt.

    Raises:
      InvalidRequestError: a search cannot be as wide as `n`.
    """
    given: dict[str, Any] = {
        "temperature": request.temperature,
        "length_penalty": request.length_penalty,
        "ignore_eos": request.ignore_eos,
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "structured_outputs": request.output_form,
    }
    return BeamSearchParams(
        beam_width=request.n or 1,
        max_tokens=max_tokens,
        **{name: value for name, value in given.items() if value is not None},
    )
