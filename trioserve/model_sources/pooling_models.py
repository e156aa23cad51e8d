"""Models that are computed in one pass over a text: what they can be asked for, and how they are pooled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.config import Pooler
from trioserve.errors import InvalidConfigError, ModelNotSupportedError
from trioserve.model_sources.json_files import structure
from trioserve.model_sources.quantized import block_types
from trioserve.model_sources.sentence_modules import (
    SentenceModules,
    SentenceSettings,
    read_modules,
    read_settings,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trioserve.config import ClassActivation, ModelConfig, PoolingType
    from trioserve.model_sources.purposes import Purpose
    from trioserve.tasks import Task

__all__ = ["PoolingFiles", "check_poolable", "make_pooler", "pooling_tasks", "read_pooling_files"]

_PADDED_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text")
"""model_types whose positions begin after that of the padding token."""


@attrs.frozen
class PoolingSizes:
    """The numbers of config.json that matter; families call them differently."""

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int | None = None
    dim: int | None = None
    """DistilBERT's hidden_size."""

    @property
    def width(self) -> int:
        """Of hidden states."""
        width = self.hidden_size or self.dim
        if width is None:
            raise ModelNotSupportedError("config.json: hidden_size is missing.")
        return width


@attrs.frozen
class _Classes:
    id2label: dict[str, str] | None = None
    num_labels: int | None = None
    problem_type: str | None = None
    sbert_ce_default_activation_function: str | None = None
    sentence_transformers: dict[str, Any] | None = None
    classifier_pooling: str | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        if self.id2label:
            return tuple(self.id2label[key] for key in sorted(self.id2label, key=int))
        return tuple(f"LABEL_{index}" for index in range(self.num_labels or 2))  # as transformers

    @property
    def activation_path(self) -> str | None:
        """What sentence-transformers wrote, now or formerly."""
        said = (self.sentence_transformers or {}).get("activation_fn")
        return said or self.sbert_ce_default_activation_function


@attrs.frozen(kw_only=True)
class PoolingFiles:
    """What a model's files say."""

    config: dict[str, Any]
    path: Path
    """Of config.json, for messages."""
    sizes: PoolingSizes
    modules: SentenceModules | None
    settings: SentenceSettings

    @property
    def context_length(self) -> int:
        """In tokens."""
        length = self.sizes.max_position_embeddings
        if self.config.get("model_type") not in _PADDED_POSITIONS:
            return length
        padding = self.config.get("pad_token_id", 1)
        return length - 1 - (padding if isinstance(padding, int) else 1)


def read_pooling_files(directory: Path, config: dict[str, Any], purpose: Purpose) -> PoolingFiles:
    """config: of config.json.

    Raises:
      ModelSourceError: a file is missing or makes no sense.
      ModelNotSupportedError: see `read_modules`.
    """
    return PoolingFiles(
        config=config,
        path=directory / "config.json",
        sizes=structure(config, PoolingSizes, directory / "config.json"),
        modules=read_modules(directory) if purpose == "embed" else None,
        settings=read_settings(directory),
    )


def check_poolable(config: Mapping[str, Any], wanted: ModelConfig, *, where: str) -> None:
    """Raises:
    ModelNotSupportedError: its weights are quantized.
    InvalidConfigError: they are to be.
    """
    if config.get("quantization_config") is not None or block_types(config):
        raise ModelNotSupportedError(
            f"{where} has quantized weights. Supported for runner=pooling are weights in bfloat16, "
            "float16 or float32."
        )
    if wanted.quantization in {"int8", "int4"}:
        raise InvalidConfigError(
            f"quantization must be auto or none with runner=pooling, got {wanted.quantization!r}.",
            field="quantization",
        )


def pooling_tasks(purpose: Purpose, pooler: Pooler) -> tuple[Task, ...]:
    """The most usual first."""
    if purpose == "token_classify":
        return ("token_classify",)
    if purpose == "classify":  # with a single label, how well two texts fit
        return ("classify", "score") if len(pooler.labels) == 1 else ("classify",)
    return ("token_embed", "score") if pooler.pooling_type == "all" else ("embed", "token_embed", "score")


def make_pooler(files: PoolingFiles, purpose: Purpose, wanted: ModelConfig) -> Pooler:
    """Raises:
    ModelSourceError: config.json makes no sense.
    ModelNotSupportedError, InvalidConfigError: what it, or the user, asks for is not possible.
    """
    make = _embedding_pooler if purpose == "embed" else _class_pooler
    return attrs.evolve(
        make(files, purpose, wanted),
        lower_case=files.settings.lower_case,
        prompts=files.settings.prompts,
        default_prompt=files.settings.default_prompt,
        similarity=files.settings.similarity,
    )


def _embedding_pooler(files: PoolingFiles, _: Purpose, wanted: ModelConfig) -> Pooler:
    usual = SentenceModules(pooling_type=_usual_pooling(files.config), normalizes=True, dense=())
    modules = files.modules or usual
    width = files.sizes.width
    for dense in modules.dense:
        if dense.in_features != width:
            raise ModelNotSupportedError(
                f"{dense.folder}/config.json: in_features must be {width}, got {dense.in_features}."
            )
        width = dense.out_features
    normalizes = wanted.pooler.use_activation
    return Pooler(
        pooling_type=wanted.pooler.pooling_type or modules.pooling_type or "all",
        normalizes=modules.normalizes if normalizes is None else normalizes,
        hidden_size=width,
        dense=modules.dense,
        dimensions=_dimensions(files.config, wanted, width),
    )


def _class_pooler(files: PoolingFiles, purpose: Purpose, wanted: ModelConfig) -> Pooler:
    classes = structure(files.config, _Classes, files.path)
    own: PoolingType = "all" if purpose == "token_classify" else _class_pooling(classes, files.config)
    if wanted.pooler.pooling_type not in {None, own}:
        raise InvalidConfigError(
            f"pooler_config.pooling_type must be {own}, for which this model's classes were trained, "
            f"got {wanted.pooler.pooling_type!r}.",
            field="pooler_config",
        )
    return Pooler(
        pooling_type=own,
        hidden_size=files.sizes.width,
        labels=classes.labels,
        activation=_class_activation(classes, purpose),
        activates=wanted.pooler.use_activation is not False,
    )


def _usual_pooling(config: Mapping[str, Any]) -> PoolingType:
    """Of models that say nothing: BERT and its kin begin with a token for the whole text; in others, which
    read from left to right, only the last token has seen all."""
    model_type = str(config.get("model_type"))
    return "cls" if any(name in model_type for name in ("bert", "electra", "ernie")) else "last"


def _class_pooling(classes: _Classes, config: Mapping[str, Any]) -> PoolingType:
    if classes.classifier_pooling in {"cls", "mean"}:  # ModernBERT's
        return "mean" if classes.classifier_pooling == "mean" else "cls"
    return _usual_pooling(config)


def _class_activation(classes: _Classes, purpose: Purpose) -> ClassActivation:
    named: dict[str, ClassActivation] = {
        "Identity": "identity",
        "Sigmoid": "sigmoid",
        "Softmax": "softmax",
    }
    if classes.activation_path is not None:
        name = classes.activation_path.rpartition(".")[2]
        if name not in named:
            raise ModelNotSupportedError(
                f"config.json: the activation of classes must be one of {', '.join(named)}, "
                f"got {classes.activation_path!r}."
            )
        return named[name]
    if classes.problem_type == "regression":
        return "identity"
    is_multiple = classes.problem_type == "multi_label_classification"
    return "sigmoid" if is_multiple or (purpose == "classify" and len(classes.labels) == 1) else "softmax"


def _dimensions(config: Mapping[str, Any], wanted: ModelConfig, width: int) -> tuple[int, ...] | None:
    said, any_size = config.get("matryoshka_dimensions"), config.get("is_matryoshka")
    if wanted.pooler.dimensions is not None:
        return _checked(wanted.pooler.dimensions, width)
    if isinstance(said, list):
        return tuple(size for size in said if isinstance(size, int) and 1 <= size <= width)
    return () if any_size else None


def _checked(dimensions: tuple[int, ...], width: int) -> tuple[int, ...]:
    if wrong := [size for size in dimensions if not 1 <= size <= width]:
        raise InvalidConfigError(
            f"pooler_config.dimensions must be integers from 1 to {width}, got {wrong[0]}.",
            field="pooler_config",
        )
    return dimensions
