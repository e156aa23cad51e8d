"""A directory in Hugging Face layout: is it whole, and what does it say about its model?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trioserve.config import DType, GenerationDefaults, ModelConfig, ResolvedModel
from trioserve.errors import InvalidConfigError, ModelSourceError
from trioserve.model_sources.json_files import read_json, structure
from trioserve.model_sources.pooling_models import (
    check_poolable,
    make_pooler,
    pooling_tasks,
    read_pooling_files,
)
from trioserve.model_sources.purposes import purpose_of
from trioserve.model_sources.quantized import block_types, check_quantization
from trioserve.model_sources.servable import architecture_of, check_servable
from trioserve.models.registry import SPEECH

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trioserve.model_sources.purposes import Purpose

__all__ = ["describe"]

_INDEX = "model.safetensors.index.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


@attrs.frozen
class _Sizes:
    """The numbers that config.json must have."""

    vocab_size: int
    max_position_embeddings: int

    @property
    def context_length(self) -> int:
        return self.max_position_embeddings


@attrs.frozen
class _SpeechSizes:
    """Those of a speech model."""

    vocab_size: int
    max_target_positions: int

    @property
    def context_length(self) -> int:
        """Of the decoder: text only."""
        return self.max_target_positions


def describe(directory: Path, tokenizer_directory: Path, config: ModelConfig) -> ResolvedModel:
    """What is in `directory`, as `config` wants it served.

    Raises:
      ModelSourceError: a file is missing or makes no sense.
      ModelNotSupportedError: see `check_servable`; or its way of pooling is not supported.
      InvalidConfigError: max_model_len is more than the model was made for; it is to be what it cannot be; or
        see `check_quantization`.
    """
    found = _read_config(directory)
    architecture = architecture_of(found, where=str(directory))
    embeds = (directory / "modules.json").is_file()
    purpose = purpose_of(architecture, config, embeds=embeds, where=str(directory))
    if purpose != "generate":
        return _describe_pooling(found, purpose, directory, tokenizer_directory, config)
    check_servable(found, where=str(directory))
    check_quantization(config, found)
    _check_weights(directory)
    _check_tokenizer(tokenizer_directory)
    hears = architecture in SPEECH
    kind: type[_Sizes | _SpeechSizes] = _SpeechSizes if hears else _Sizes
    sizes = structure(found, kind, directory / "config.json")
    generation = read_json(directory / "generation_config.json", missing_ok=True)
    defaults = _generation_defaults(generation, directory / "generation_config.json")
    return ResolvedModel(
        directory=str(directory),
        tokenizer_directory=str(tokenizer_directory),
        architecture=architecture,
        dtype=_speech_dtype(config) if hears else _dtype_of(found, config),
        quantization=config.quantization,
        blocks=block_types(found),
        vocab_size=sizes.vocab_size,
        context_length=sizes.context_length,
        max_model_len=_max_model_len(config.max_model_len, sizes.context_length),
        eos_token_ids=_eos_token_ids(generation, found),
        generation=defaults.overridden_by(config.generation),
        tasks=("transcription",) if hears else ("generate",),
    )


def _describe_pooling(
    found: dict[str, Any],
    purpose: Purpose,
    directory: Path,
    tokenizer_directory: Path,
    config: ModelConfig,
) -> ResolvedModel:
    check_poolable(found, config, where=str(directory))
    _check_weights(directory)
    _check_tokenizer(tokenizer_directory)
    files = read_pooling_files(directory, found, purpose)
    pooler = make_pooler(files, purpose, config)
    return ResolvedModel(
        directory=str(directory),
        tokenizer_directory=str(tokenizer_directory),
        architecture=architecture_of(found, where=str(directory)),
        # These models are small, and what they give is compared by its last digits.
        dtype="float32" if config.dtype == "auto" else config.dtype,
        quantization=config.quantization,
        vocab_size=files.sizes.vocab_size,
        context_length=files.context_length,
        max_model_len=_max_model_len(
            config.max_model_len, files.context_length, usual=files.settings.max_seq_length
        ),
        eos_token_ids=(),
        generation=config.generation,
        runner="pooling",
        tasks=pooling_tasks(purpose, pooler),
        pooler=pooler,
    )


def _read_config(directory: Path) -> dict[str, Any]:
    if not (directory / "config.json").is_file():
        ggufs = sorted(path.name for path in directory.glob("*.gguf"))
        hint = f" It holds {ggufs[0]}: give that file instead." if ggufs else ""
        raise ModelSourceError(
            f"{directory} has no config.json, so it is no Hugging Face model directory.{hint}"
        )
    return read_json(directory / "config.json")


def _check_weights(directory: Path) -> None:
    if (directory / _INDEX).is_file():
        weight_map = read_json(directory / _INDEX).get("weight_map")
        shards = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
        missing = [shard for shard in shards if not (directory / str(shard)).is_file()]
        if not shards or missing:
            problem = f"and {', '.join(map(str, missing))} is missing" if missing else "which names no file"
            raise ModelSourceError(f"The weights of {directory} are listed in {_INDEX}, {problem}.")
        return
    if not any(directory.glob("*.safetensors")):
        others = sorted(path.name for path in (*directory.glob("*.bin"), *directory.glob("*.pt*")))
        hint = f" ({', '.join(others)}: other formats are not read)" if others else ""
        raise ModelSourceError(f"{directory} has no *.safetensors{hint}.")


def _check_tokenizer(directory: Path) -> None:
    if not (directory / "tokenizer.json").is_file():
        raise ModelSourceError(
            f"{directory} has no tokenizer.json. Save it with transformers "
            "(AutoTokenizer, save_pretrained), or name another tokenizer (--tokenizer)."
        )


def _dtype_of(found: Mapping[str, Any], wanted: ModelConfig) -> DType:
    """What is wanted; else what the weights were saved in, where we serve that. float16, and what is to be
    quantized, is served in bfloat16."""
    if wanted.dtype != "auto":
        return wanted.dtype
    saved = found.get("dtype", found.get("torch_dtype"))
    return "float32" if saved == "float32" and wanted.quantization in {"auto", "none"} else "bfloat16"


def _speech_dtype(wanted: ModelConfig) -> DType:
    """Always float32: these models are small, and what they write is compared word for word.

    Raises:
      InvalidConfigError: something else is wanted.
    """
    if wanted.dtype == "bfloat16" or wanted.quantization not in {"auto", "none"}:
        field = "dtype" if wanted.dtype == "bfloat16" else "quantization"
        raise InvalidConfigError(
            f"{field} must be auto for speech models, which are computed in float32, "
            f"got {getattr(wanted, field)!r}.",
            field=field,
        )
    return "float32"


def _max_model_len(wanted: int | None, context_length: int, *, usual: int | None = None) -> int:
    """usual: what holds where the user wants nothing, if it is less than the context."""
    if wanted is not None and wanted > context_length:
        raise InvalidConfigError(
            f"max_model_len must be at most {context_length}, the model's context length, got {wanted}.",
            field="max_model_len",
        )
    return wanted or min(usual or context_length, context_length)


def _eos_token_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for source in sources:
        found = source.get("eos_token_id")
        for token in found if isinstance(found, list) else [found]:
            if isinstance(token, int):
                ids[token] = None
    return tuple(ids)


def _generation_defaults(values: Mapping[str, Any], path: Path) -> GenerationDefaults:
    """A model that asks for greedy decoding (do_sample: false) has no say in how to sample."""
    dropped = _SAMPLING if values.get("do_sample") is False else ()
    kept = {name: value for name, value in values.items() if name not in dropped}
    return structure(kept, GenerationDefaults, path)
