"""The request fields that chat completions and completions share."""

from __future__ import annotations

import attrs

__all__ = ["SamplingFields", "StreamOptions"]


@attrs.frozen(kw_only=True)
class StreamOptions:
    include_usage: bool | None = None
    """One more chunk, before the end, that carries the usage."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk carries the usage so far."""


@attrs.frozen(kw_only=True)
class SamplingFields:
    """None always means "not given": the model's default, then ours, holds.

    Ranges are those of `trioserve.sampling_params.SamplingParams`.
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
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)
