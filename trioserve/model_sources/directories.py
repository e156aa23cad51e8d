"""A directory in Hugging Face layout: is it whole, and what does it say about its model?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.config import DType, GenerationDefaults, ModelConfig, ResolvedModel
from trioserve.errors import InvalidConfigError, ModelSourceError
from trioserve.model_sources.quantized import block_types, check_quantization
from trioserve.model_sources.servable import check_servable
from trioserve.structuring import find_problems, make_converter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["describe", "read_json"]

_INDEX = "model.safetensors.index.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")

_converter = make_converter(forbid_extra_keys=False)


@attrs.frozen
class _Sizes:
    """The numbers that config.json must have."""

    vocab_size: int
    max_position_embeddings: int


def describe(directory: Path, tokenizer_directory: Path, config: ModelConfig) -> ResolvedModel:
    """What is in `directory`, as `config` wants it served.

    Raises:
      ModelSourceError: a file is missing or makes no sense.
      ModelNotSupportedError: see `check_servable`.
      InvalidConfigError: max_model_len is more than the model was made for; or see `check_quantization`.
    """
    found = _read_config(directory)
    architecture = check_servable(found, where=str(directory))
    check_quantization(config, found)
    _check_weights(directory)
    _check_tokenizer(tokenizer_directory)
    sizes = _structure(found, _Sizes, directory / "config.json")
    generation = read_json(directory / "generation_config.json", missing_ok=True)
    defaults = _generation_defaults(generation, directory / "generation_config.json")
    return ResolvedModel(
        directory=str(directory),
        tokenizer_directory=str(tokenizer_directory),
        architecture=architecture,
        dtype=_dtype_of(found, config),
        quantization=config.quantization,
        blocks=block_types(found),
        vocab_size=sizes.vocab_size,
        context_length=sizes.max_position_embeddings,
        max_model_len=_max_model_len(config.max_model_len, sizes.max_position_embeddings),
        eos_token_ids=_eos_token_ids(generation, found),
        generation=defaults.overridden_by(config.generation),
    )


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The JSON object in a file; {} for one that may be missing and is.

    Raises:
      ModelSourceError: it cannot be read, or holds no JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise ModelSourceError(f"There is no {path}.") from None
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ModelSourceError(f"{path} must hold a JSON object, and holds a {type(value).__name__}.")
    return value


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


def _structure(values: Mapping[str, Any], kind: type[Any], path: Path) -> Any:
    try:
        return _converter.structure(values, kind)
    except Exception as error:  # cattrs raises groups of anything; each leaf becomes a line
        problems = "; ".join(f"{problem.path} {problem.message}" for problem in find_problems(error))
        raise ModelSourceError(f"{path}: {problems}.") from None


def _dtype_of(found: Mapping[str, Any], wanted: ModelConfig) -> DType:
    """What is wanted; else what the weights were saved in, where we serve that. float16, and what is to be
    quantized, is served in bfloat16."""
    if wanted.dtype != "auto":
        return wanted.dtype
    saved = found.get("dtype", found.get("torch_dtype"))
    return "float32" if saved == "float32" and wanted.quantization in {"auto", "none"} else "bfloat16"


def _max_model_len(wanted: int | None, context_length: int) -> int:
    if wanted is not None and wanted > context_length:
        raise InvalidConfigError(
            f"max_model_len must be at most {context_length}, the model's context length, got {wanted}.",
            field="max_model_len",
        )
    return wanted or context_length


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
    defaults: GenerationDefaults = _structure(kept, GenerationDefaults, path)
    return defaults
