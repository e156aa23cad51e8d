"""The files that sentence-transformers puts beside a model: what follows its hidden states, and its prompts.

modules.json lists the modules of a pipeline, each with the folder of its own files: Transformer, then usually
Pooling, sometimes Dense, and Normalize.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, get_args

import attrs

from trioserve.config import DenseModule, PoolingType, Similarity
from trioserve.errors import ModelNotSupportedError, ModelSourceError
from trioserve.model_sources.json_files import read_json, read_json_list, structure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trioserve.config import DenseActivation

__all__ = ["DENSE_ACTIVATIONS", "SentenceModules", "SentenceSettings", "read_modules", "read_settings"]

DENSE_ACTIVATIONS: dict[str, DenseActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
"""torch's class, the last part of its path -> what we call it."""

_POOLING_TYPES: dict[str, PoolingType] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}

_MODE_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""How Pooling's config.json said it before `pooling_mode`."""

_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
_IGNORED = ("Dropout",)

_SETTINGS_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


@attrs.frozen(kw_only=True)
class SentenceModules:
    """What follows the hidden states."""

    pooling_type: PoolingType | None
    """None: there is no Pooling, so that results are per token."""
    normalizes: bool
    dense: tuple[DenseModule, ...]


@attrs.frozen(kw_only=True)
class SentenceSettings:
    """What comes before the tokens, and how embeddings are compared."""

    max_seq_length: int | None = None
    lower_case: bool = False
    prompts: dict[str, str] = attrs.field(factory=dict)
    default_prompt: str | None = None
    similarity: Similarity = "cosine"


@attrs.frozen
class _Module:
    type: str
    path: str = ""

    @property
    def name(self) -> str:
        """Its class; the package that it is in has moved between versions."""
        return self.type.rpartition(".")[2]


@attrs.frozen
class _Dense:
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    use_residual: bool = False


@attrs.frozen
class _Config:
    prompts: dict[str, str] = attrs.field(factory=dict)
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None


@attrs.frozen
class _Settings:
    max_seq_length: int | None = None
    do_lower_case: bool = False


def read_modules(directory: Path) -> SentenceModules | None:
    """None: the directory has no modules.json.

    Raises:
      ModelSourceError: a file is missing or makes no sense.
      ModelNotSupportedError: a module, or a setting of one, that is not supported.
    """
    path = directory / "modules.json"
    listed = read_json_list(path)
    if listed is None:
        return None
    modules = [module for module in structure(listed, list[_Module], path) if module.name not in _IGNORED]
    _check_order(modules, path)
    return SentenceModules(
        pooling_type=_pooling_type(directory, modules),
        normalizes=any(module.name == "Normalize" for module in modules),
        dense=tuple(_dense(directory, module) for module in modules if module.name == "Dense"),
    )


def read_settings(directory: Path) -> SentenceSettings:
    """From those files that are there.

    Raises:
      ModelSourceError: one makes no sense.
      ModelNotSupportedError: embeddings are compared in a way that is not supported.
    """
    config_path = directory / "config_sentence_transformers.json"
    config = structure(read_json(config_path, missing_ok=True), _Config, config_path)
    path = next((directory / name for name in _SETTINGS_FILES if (directory / name).is_file()), None)
    settings = structure(read_json(path), _Settings, path) if path else _Settings()
    if config.default_prompt_name not in {None, *config.prompts}:
        raise ModelSourceError(
            f"{config_path}: default_prompt_name must be one of {', '.join(config.prompts)}, "
            f"got {config.default_prompt_name!r}."
        )
    known = get_args(Similarity)
    if config.similarity_fn_name not in {None, *known}:
        raise ModelNotSupportedError(
            f"{config_path}: similarity_fn_name must be one of {', '.join(known)}, "
            f"got {config.similarity_fn_name!r}."
        )
    return SentenceSettings(
        max_seq_length=settings.max_seq_length,
        lower_case=settings.do_lower_case,
        prompts=config.prompts,
        default_prompt=config.default_prompt_name,
        similarity=cast("Similarity", config.similarity_fn_name or "cosine"),
    )


def _check_order(modules: Sequence[_Module], path: Path) -> None:
    names = [module.name for module in modules]
    places = [_ORDER.index(name) if name in _ORDER else -1 for name in names]
    once = all(names.count(name) <= 1 for name in ("Transformer", "Pooling", "Normalize"))
    if -1 in places or places != sorted(places) or not once or names[:1] != ["Transformer"]:
        raise ModelNotSupportedError(
            f"{path} lists {', '.join(names)}. Supported are Transformer, Pooling, any number of Dense, and "
            "Normalize, in this order."
        )


def _pooling_type(directory: Path, modules: Sequence[_Module]) -> PoolingType | None:
    module = next((module for module in modules if module.name == "Pooling"), None)
    if module is None:
        return None
    path = directory / module.path / "config.json"
    config = read_json(path, missing_ok=True)
    modes = _modes(config)
    if config.get("include_prompt", True) is not True:
        raise ModelNotSupportedError(f"{path} leaves the prompt out of the pooling, which is not supported.")
    if len(modes) != 1 or modes[0] not in _POOLING_TYPES:
        raise ModelNotSupportedError(
            f"{path} asks for {' and '.join(map(str, modes))} pooling. Supported is one of "
            f"{', '.join(_POOLING_TYPES)}."
        )
    return _POOLING_TYPES[modes[0]]


def _modes(config: dict[str, Any]) -> list[Any]:
    """sentence-transformers' own default is the mean; also if there is no file, which some copies lack."""
    if (mode := config.get("pooling_mode")) is not None:
        return mode if isinstance(mode, list) else [mode]
    return [mode for key, mode in _MODE_KEYS.items() if config.get(key)] or ["mean"]


def _dense(directory: Path, module: _Module) -> DenseModule:
    path = directory / module.path / "config.json"
    config = structure(read_json(path), _Dense, path)
    activation = DENSE_ACTIVATIONS.get(config.activation_function.rpartition(".")[2])
    if activation is None or config.use_residual:
        what = "use_residual" if config.use_residual else config.activation_function
        raise ModelNotSupportedError(
            f"{path} has {what}, which is not supported. Supported are, without use_residual: "
            f"{', '.join(DENSE_ACTIVATIONS)}."
        )
    if not (directory / module.path / "model.safetensors").is_file():
        raise ModelSourceError(f"There is no {directory / module.path / 'model.safetensors'}.")
    return DenseModule(
        folder=module.path,
        in_features=config.in_features,
        out_features=config.out_features,
        bias=config.bias,
        activation=activation,
    )
