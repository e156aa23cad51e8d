"""The request fields that chat completions and completions share."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.frontend.prompts import Truncation
from trioserve.sampling_params import RepetitionDetection
from trioserve.server.protocol.response_format import ResponseFormat
from trioserve.structured_outputs import StructuredOutputsParams

__all__ = ["SamplingFields", "StreamOptions"]


@attrs.frozen(kw_only=True)
class StreamOptions:
    include_usage: bool | None = None
    """One more chunk, before the end, that carries the usage."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk carries the usage so far."""
    include_obfuscation: bool | None = None
    """Without an effect: chunks are never padded."""


@attrs.frozen(kw_only=True)
class SamplingFields:
    """None always means "not given": the model's default, then ours, holds.

    Ranges and meanings are those of `trioserve.sampling_params.SamplingParams`.
    """

    model: str | None = None
    n: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    """With logprobs: report these tokens', too, after the most likely ones."""
    return_tokens_as_token_ids: bool | None = None
    """Logprobs name tokens as "token_id:42", which no two tokens have in common."""
    truncate_prompt_tokens: int | None = None
    """A longer prompt is cut to so many tokens; -1: to what leaves room for the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """Where it is cut; by default at the left, so that the end is kept."""
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = None
    """-1: no limit."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    """The other way of saying it; only one of the two may constrain the output."""
    vllm_xargs: dict[str, Any] | None = None
    """For custom logits processors."""
    extra_args: dict[str, Any] | None = None
    """Another spelling of `vllm_xargs`."""
    use_beam_search: bool | None = None
    """Search for the n best answers instead of drawing; see `trioserve.beam_search_params`."""
    length_penalty: float | None = None
    """Of a beam search."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout: float | None = None
    """Seconds that the request may take, from its headers to its last token."""
    return_token_ids: bool | None = None

    @property
    def num_sequences(self) -> int:
        """So many run in the engine at a time."""
        return self.n or 1

    @property
    def num_prompt_logprobs(self) -> int | None:
        """None: no logprobs of the prompt."""
        return self.prompt_logprobs

    def truncation(self, room: int) -> Truncation | None:
        """Of prompts that share a context of `room` tokens with their answer's limit.

        Raises:
          InvalidRequestError: more tokens are to be kept than that leaves.
        """
        if self.truncate_prompt_tokens is None:
            return None
        most = room - (self.token_limit or 1)
        if most < 1:
            return None  # whatever the prompt is: then it is the limit that is wrong, and refused as that
        wanted = self.truncate_prompt_tokens
        if wanted > most:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be at most {most}, which is what the context of {room} tokens "
                f"leaves beside the answer's limit, got {wanted}.",
                parameter="truncate_prompt_tokens",
            )
        return Truncation(most if wanted == -1 else wanted, keeps_end=self.truncation_side != "right")

    @property
    def token_limit(self) -> int | None:
        """Tokens of an answer; None: what the model and its context allow."""
        return self.max_tokens

    @property
    def output_form(self) -> StructuredOutputsParams | None:
        """What the output must match."""
        if self.structured_outputs is not None or self.response_format is None:
            return self.structured_outputs
        return self.response_format.params()

    @property
    def custom_args(self) -> dict[str, Any] | None:
        return (self.vllm_xargs or {}) | (self.extra_args or {}) or None

    @property
    def field_names(self) -> dict[str, str]:
        """What the engine calls a parameter -> the field that the client used, where that is another."""
        names = {"beam_width": "n"}
        if self.response_format is None or self.structured_outputs is not None:
            return names
        return names | {"structured_outputs": "response_format"}

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)
