"""The shape of a decoder model, read from its config.json. Imports no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import attrs

from trioserve.errors import ModelNotSupportedError
from trioserve.structuring import find_problems, make_converter

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DecoderConfig", "RotaryConfig", "llama_config"]


@attrs.frozen(kw_only=True)
class RotaryConfig:
    """How positions turn into angles; the formulas are in `trioserve.models.rotary`."""

    theta: float
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    """Of linear and llama3: how many times longer than the original context the model reaches."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """All that the shared decoder layers need to know.

    Invariants: every size is positive, num_heads is a multiple of num_kv_heads, head_dim is even.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rotary: RotaryConfig
    tie_word_embeddings: bool
    """The output matrix is the embedding matrix."""
    qkv_bias: bool
    output_bias: bool
    """Of the attention's output projection."""
    mlp_bias: bool

    @property
    def attention_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)


def _positive(_: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"{attribute.name} must be above 0, got {value!r}")


def _size(default: Any = attrs.NOTHING) -> Any:
    return attrs.field(default=default, validator=_positive)


@attrs.frozen(kw_only=True)
class _RopeJson:
    """`rope_parameters` of transformers 5, `rope_scaling` of the versions before."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = _size(None)
    factor: float = _size(1.0)
    low_freq_factor: float = _size(1.0)
    high_freq_factor: float = _size(4.0)
    original_max_position_embeddings: int | None = _size(None)
    partial_rotary_factor: float = 1.0


@attrs.frozen(kw_only=True)
class _LlamaJson:
    """The keys of a Llama config.json that we read; the defaults are those of transformers' LlamaConfig.

    The sizes have no default here: a file that leaves them out is damaged.
    """

    vocab_size: int = _size()
    hidden_size: int = _size()
    intermediate_size: int = _size()
    num_hidden_layers: int = _size()
    num_attention_heads: int = _size()
    num_key_value_heads: int | None = _size(None)
    head_dim: int | None = _size(None)
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = _size(2048)
    hidden_act: Literal["silu"] = "silu"
    rope_theta: float = _size(10000.0)
    rope_scaling: _RopeJson | None = None
    rope_parameters: _RopeJson | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


_converter = make_converter(forbid_extra_keys=False)


def llama_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The configuration of a Llama-family model from the contents of its config.json.

    Raises:
      ModelNotSupportedError: keys are missing or wrong, or ask for what is not implemented; names them all.
    """
    try:
        parsed = _converter.structure(dict(raw), _LlamaJson)
    except Exception as error:  # whatever it is, it is about this file: each problem is named
        problems = "; ".join(f"{p.path} {p.message}".strip() for p in find_problems(error))
        raise ModelNotSupportedError(f"config.json: {problems}.") from error
    num_kv_heads = parsed.num_key_value_heads or parsed.num_attention_heads
    return DecoderConfig(
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        intermediate_size=parsed.intermediate_size,
        num_layers=parsed.num_hidden_layers,
        num_heads=_multiple(parsed.num_attention_heads, num_kv_heads),
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(parsed),
        rms_norm_eps=parsed.rms_norm_eps,
        rotary=_rotary_config(parsed),
        tie_word_embeddings=parsed.tie_word_embeddings,
        qkv_bias=parsed.attention_bias,
        output_bias=parsed.attention_bias,
        mlp_bias=parsed.mlp_bias,
    )


def _multiple(num_heads: int, num_kv_heads: int) -> int:
    if num_heads % num_kv_heads:
        raise ModelNotSupportedError(
            f"config.json: num_attention_heads ({num_heads}) is no multiple of "
            f"num_key_value_heads ({num_kv_heads})."
        )
    return num_heads


def _head_dim(parsed: _LlamaJson) -> int:
    if parsed.head_dim is None and parsed.hidden_size % parsed.num_attention_heads:
        raise ModelNotSupportedError(
            f"config.json: head_dim is missing, and hidden_size ({parsed.hidden_size}) is no multiple of "
            f"num_attention_heads ({parsed.num_attention_heads})."
        )
    head_dim = parsed.head_dim or parsed.hidden_size // parsed.num_attention_heads
    if head_dim % 2:
        raise ModelNotSupportedError(f"config.json: head_dim must be even, got {head_dim}.")
    return head_dim


def _rotary_config(parsed: _LlamaJson) -> RotaryConfig:
    rope = parsed.rope_parameters or parsed.rope_scaling or _RopeJson()
    scaling = rope.rope_type or rope.type or "default"
    if scaling not in {"default", "linear", "llama3"} or rope.partial_rotary_factor != 1.0:
        raise ModelNotSupportedError(
            "config.json: the rotary embedding must be of type default, linear or llama3 over whole heads, "
            f"got type {scaling!r} with partial_rotary_factor {rope.partial_rotary_factor}."
        )
    return RotaryConfig(
        theta=rope.rope_theta or parsed.rope_theta,
        scaling=scaling,  # type: ignore[arg-type]  # checked above; mypy does not narrow by a set
        factor=rope.factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        original_context_length=rope.original_max_position_embeddings or parsed.max_position_embeddings,
    )
