"""What adapter_config.json says, as PEFT (https://huggingface.co/docs/peft) writes it. Imports no torch."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from trioserve.errors import ModelNotSupportedError, ModelSourceError
from trioserve.structuring import find_problems, make_converter
from trioserve.validators import shown
from trioserve.worker.regular_files import read_regular_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["ADAPTER_FILES", "CONFIG_FILE", "WEIGHTS_FILE", "AdapterConfig", "read_adapter_config"]

T = TypeVar("T")

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""All that is read of an adapter's directory."""

_MAX_CONFIG_BYTES = 2**20
"""A thousand times what it usually takes."""

_UNSUPPORTED = (
    "alora_invocation_tokens", "fan_in_fan_out", "layer_replication", "lora_bias", "modules_to_save",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip
"""Keys that make something else of an adapter than W + scale * B A, where they are set."""

_HARMLESS_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Of `init_lora_weights`; what begins in another way has changed the model's own weights, too."""

_converter = make_converter(forbid_extra_keys=False)


def _above_zero(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{attribute.name} must be above 0, got {value!r}")


@attrs.frozen(kw_only=True)
class AdapterConfig:
    """The keys that we read."""

    peft_type: str
    r: int = attrs.field(validator=_above_zero)
    lora_alpha: float = attrs.field(default=8.0, validator=_above_zero)
    bias: str = "none"
    use_rslora: bool = False
    rank_pattern: dict[str, int] = attrs.field(factory=dict)
    alpha_pattern: dict[str, float] = attrs.field(factory=dict)

    def rank(self, module: str) -> int:
        """Of a module by its path, such as `model.layers.0.mlp.up_proj`."""
        return _find(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """What B A is multiplied with: alpha / rank; "rank-stabilized", alpha / sqrt(rank)
        (https://arxiv.org/abs/2312.03732)."""
        rank = self.rank(module)
        alpha = _find(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _find(pattern: Mapping[str, T], module: str, default: T) -> T:
    """The first entry that names the module: the end of its path or, after a `^`, all of it."""
    for name, value in pattern.items():
        whole = name.startswith("^")
        if module == name.removeprefix("^") or (not whole and module.endswith("." + name)):
            return value
    return default


def read_adapter_config(path: Path) -> AdapterConfig:
    """
    Raises:
      ModelSourceError: the file is missing or damaged.
      ModelNotSupportedError: it is no plain LoRA adapter, or of a kind that is not implemented.
    """
    try:
        raw = json.loads(read_regular_file(path, max_bytes=_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelSourceError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelSourceError(f"{path} does not hold a JSON object.")
    given = {name: value for name, value in raw.items() if value is not None}
    try:
        config = _converter.structure(given, AdapterConfig)
    except Exception as error:  # cattrs raises groups of whatever went wrong
        problem = find_problems(error)[0]
        found = f"{problem.path} {problem.message}".strip()
        raise ModelSourceError(f"{path} is damaged: {found}.") from error
    _check(config, raw)
    return config


def _check(config: AdapterConfig, raw: Mapping[str, Any]) -> None:
    if config.peft_type != "LORA":
        raise _refusal("peft_type", config.peft_type, "LORA")
    if config.bias != "none":
        raise _refusal("bias", config.bias, "none")
    for name in _UNSUPPORTED:
        if raw.get(name):
            raise _refusal(name, raw[name], "unset")
    if (start := raw.get("init_lora_weights")) not in _HARMLESS_STARTS:
        raise _refusal("init_lora_weights", start, "a start that leaves the model's weights as they are")
    for name in ("rank_pattern", "alpha_pattern"):
        for key, value in getattr(config, name).items():
            if not key.removeprefix("^").replace(".", "").replace("_", "").isalnum():
                raise _refusal(f"a key of {name}", key, "a module's name, not a regular expression")
            if not 0 < value < math.inf:
                raise _refusal(f"{name}[{key!r}]", value, "above 0")


def _refusal(name: str, value: object, allowed: str) -> ModelNotSupportedError:
    return ModelNotSupportedError(f"The adapter's {name} must be {allowed}, got {shown(value)}.")
