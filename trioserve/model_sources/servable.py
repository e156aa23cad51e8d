"""Can a model be served, by what its config.json says? If not, why not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trioserve.errors import ModelNotSupportedError
from trioserve.model_sources.purposes import POOLING_ARCHITECTURES, natural_purpose
from trioserve.models.registry import SPEECH, SUPPORTED

__all__ = ["architecture_of", "check_architecture", "check_servable", "is_servable"]

_ROPE_TYPES = ("default", "linear", "llama3")


def is_servable(architecture: str) -> bool:
    """Of models that generate, those with an implementation of ours; of others all, as far as can be said
    before the engine core has asked transformers."""
    return architecture in (*SUPPORTED, *SPEECH) or natural_purpose(architecture) != "generate"


def check_servable(config: Mapping[str, Any], *, where: str) -> None:
    """Raises:
    ModelNotSupportedError: the architecture, a quantization or a rope scaling is not supported.
    """
    architecture = architecture_of(config, where=where)
    check_architecture(architecture, where=where, model_type=config.get("model_type"))
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ModelNotSupportedError(
            f"{where} has weights quantized by {method!r} (quantization_config). Supported are weights in "
            "bfloat16, float16 or float32, and quantized .gguf files."
        )
    _check_rope(config, where)


def check_architecture(architecture: str, *, where: str, model_type: str | None = None) -> None:
    """Raises ModelNotSupportedError unless models of this architecture are served."""
    if not is_servable(architecture):
        kind = f" (model_type {model_type!r})" if model_type else ""
        raise ModelNotSupportedError(
            f"{where} has the architecture {architecture}{kind}, which is not supported. {_supported()}"
        )


def architecture_of(config: Mapping[str, Any], *, where: str) -> str:
    """The first that config.json names. Raises ModelNotSupportedError: it names none."""
    found = config.get("architectures")
    if not isinstance(found, list) or not found:
        raise ModelNotSupportedError(
            f"{where} names no architecture in its config.json (model_type {config.get('model_type')!r}). "
            f"{_supported()}"
        )
    return str(found[0])


def _supported() -> str:
    return (
        f"Supported are: {', '.join(sorted((*SUPPORTED, *SPEECH)))}; and "
        "with runner=pooling what transformers has of "
        f"{', '.join(POOLING_ARCHITECTURES)}, and ...ForCausalLM with convert=embed."
    )


def _check_rope(config: Mapping[str, Any], where: str) -> None:
    # transformers wrote rope_scaling up to version 4 and writes rope_parameters since; old files say `type`.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for kind in _rope_types(rope):
        if kind not in {None, "none", *_ROPE_TYPES}:
            raise ModelNotSupportedError(
                f"{where} scales its rotary embeddings by {kind!r}, which is not supported. "
                f"Supported are: {', '.join(_ROPE_TYPES)}."
            )


def _rope_types(rope: object) -> Iterator[object]:
    """One; or one for each kind of layer (`full_attention` and so on)."""
    if not isinstance(rope, Mapping):
        yield rope
        return
    yield rope.get("rope_type", rope.get("type"))
    for nested in rope.values():
        if isinstance(nested, Mapping):
            yield from _rope_types(nested)
