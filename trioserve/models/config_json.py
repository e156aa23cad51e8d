"""What the families' config.json have in common, and how they are read. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs

from trioserve.errors import ModelNotSupportedError
from trioserve.models.config import LayerConfig, RotaryConfig
from trioserve.structuring import find_problems, make_converter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "FULL",
    "SLIDING",
    "HeadSizes",
    "RopeJson",
    "check_heads",
    "head_dim_of",
    "layers_of",
    "read_config",
    "rotary_config",
    "size",
]

FULL, SLIDING = "full_attention", "sliding_attention"
"""The entries of `layer_types`."""


def _positive(_: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"{attribute.name} must be above 0, got {value!r}")


def size(default: Any = attrs.NOTHING) -> Any:
    """A field that must be above 0 (or None, where its type allows that)."""
    return attrs.field(default=default, validator=_positive)


@attrs.frozen(kw_only=True)
class RopeJson:
    """`rope_parameters` of transformers 5, `rope_scaling` of the versions before."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = size(None)
    factor: float = size(1.0)
    low_freq_factor: float = size(1.0)
    high_freq_factor: float = size(4.0)
    original_max_position_embeddings: int | None = size(None)
    partial_rotary_factor: float = 1.0


Json = TypeVar("Json")

_converter = make_converter(forbid_extra_keys=False)


def read_config(raw: Mapping[str, Any], kind: type[Json]) -> Json:
    """The keys that `kind` names, checked; others are ignored.

    Raises:
      ModelNotSupportedError: keys are missing or wrong, or ask for what is not implemented; names them all.
    """
    try:
        return _converter.structure(dict(raw), kind)
    except Exception as error:  # whatever it is, it is about this file: each problem is named
        problems = "; ".join(f"{p.path} {p.message}".strip() for p in find_problems(error))
        raise ModelNotSupportedError(f"config.json: {problems}.") from error


class HeadSizes(Protocol):
    """The keys that say how an attention is cut into heads."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def head_dim(self) -> int | None: ...


def check_heads(num_heads: int, num_kv_heads: int) -> int:
    """`num_heads`, if the key-value heads share them out evenly; ModelNotSupportedError otherwise."""
    if num_heads % num_kv_heads:
        raise ModelNotSupportedError(
            f"config.json: num_attention_heads ({num_heads}) is no multiple of "
            f"num_key_value_heads ({num_kv_heads})."
        )
    return num_heads


def head_dim_of(parsed: HeadSizes) -> int:
    """`head_dim`, or what is left to each head. Raises ModelNotSupportedError if that is not even."""
    if parsed.head_dim is None and parsed.hidden_size % parsed.num_attention_heads:
        raise ModelNotSupportedError(
            f"config.json: head_dim is missing, and hidden_size ({parsed.hidden_size}) is no multiple of "
            f"num_attention_heads ({parsed.num_attention_heads})."
        )
    head_dim = parsed.head_dim or parsed.hidden_size // parsed.num_attention_heads
    if head_dim % 2:
        raise ModelNotSupportedError(f"config.json: head_dim must be even, got {head_dim}.")
    return head_dim


def rotary_config(rope: RopeJson | None, *, theta: float, context_length: int) -> RotaryConfig:
    """`theta` and `context_length` hold where `rope` does not say.

    Raises:
      ModelNotSupportedError: a kind of scaling that is not implemented.
    """
    rope = rope or RopeJson()
    scaling = rope.rope_type or rope.type or "default"
    if scaling not in {"default", "linear", "llama3"} or rope.partial_rotary_factor != 1.0:
        raise ModelNotSupportedError(
            "config.json: the rotary embedding must be of type default, linear or llama3 over whole heads, "
            f"got type {scaling!r} with partial_rotary_factor {rope.partial_rotary_factor}."
        )
    return RotaryConfig(
        theta=rope.rope_theta or theta,
        scaling=scaling,  # type: ignore[arg-type]  # checked above; mypy does not narrow by a set
        factor=rope.factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        original_context_length=rope.original_max_position_embeddings or context_length,
    )


def layers_of(
    layer_types: Sequence[str], num_layers: int, *, full: LayerConfig, sliding: LayerConfig
) -> tuple[LayerConfig, ...]:
    """One of the two for each layer.

    Raises:
      ModelNotSupportedError: there is another number of types than of layers, or a sliding layer no window.
    """
    if len(layer_types) != num_layers:
        raise ModelNotSupportedError(
            f"config.json: layer_types has {len(layer_types)} entries for {num_layers} layers."
        )
    if SLIDING in layer_types and sliding.window is None:
        raise ModelNotSupportedError("config.json: sliding_window is missing, and layer_types names it.")
    return tuple(sliding if kind == SLIDING else full for kind in layer_types)
