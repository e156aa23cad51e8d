"""`python -m trioserve.model_sources.convert_gguf`: the helper process that converts a GGUF file."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.errors import ModelNotSupportedError, ModelSourceError
from trioserve.model_sources.gguf_architecture import GgufArchitecture
from trioserve.model_sources.gguf_architectures import architecture_of
from trioserve.model_sources.gguf_header import GgufHeader, read_header
from trioserve.model_sources.gguf_rope import ROPE_FACTORS, rope_scaling
from trioserve.model_sources.gguf_tokenizer import build_tokenizer, tokenizer_config
from trioserve.model_sources.gguf_vocabulary import Vocabulary
from trioserve.model_sources.gguf_weights import GgufWeights
from trioserve.model_sources.helper_process import run_helper
from trioserve.model_sources.json_files import write_json
from trioserve.model_sources.safetensors_writer import write_safetensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["convert"]

_DTYPE = "bfloat16"
"""Of what is computed, by default: the blocks carry less."""


def convert(source: Path, target: Path) -> None:
    """Convert the GGUF file `source` into the (empty) directory `target`.

    Written are config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
    model.safetensors, which has each quantized matrix as the blocks that it was (see `gguf_weights`): uint8
    [rows, bytes per row], and under its name in `__metadata__` the blocks' GGUF type. config.json's
    `gguf_types` has the types of the file's matrices, and how many of each there are.

    Raises:
      ModelSourceError: the file is damaged.
      ModelNotSupportedError: it holds something that cannot be converted.
    """
    header = read_header(source)
    model = _Model(header, architecture_of(header, where=str(source)), GgufWeights(source))
    vocabulary = Vocabulary(header.metadata)
    token_ids = _token_ids(vocabulary, model.architecture)
    config = model.config() | {"dtype": _DTYPE, "gguf_types": model.types()} | token_ids
    write_json(target / "config.json", config)
    write_json(target / "generation_config.json", token_ids)
    write_json(target / "tokenizer_config.json", tokenizer_config(vocabulary))
    build_tokenizer(vocabulary).save(str(target / "tokenizer.json"))
    model.write_weights(config, target / "model.safetensors")


@attrs.frozen
class _Model:
    """An open file."""

    header: GgufHeader
    architecture: GgufArchitecture
    weights: GgufWeights

    def config(self) -> dict[str, Any]:
        """config.json, but for dtype and token ids."""
        config = {"architectures": [self.architecture.name], **self.architecture.make_config(self.header)}
        factors = self.header.tensors.get(ROPE_FACTORS)
        divisors = None if factors is None else self.weights.floats(factors).tolist()
        return config | {"rope_scaling": rope_scaling(self.header, config, divisors)}

    def types(self) -> dict[str, int]:
        """The types of matrices, and how many have them; most frequent first."""
        matrices = (entry for entry in self.header.tensors.values() if len(entry.shape) > 1)
        return dict(Counter(self.weights.type_name(entry) for entry in matrices).most_common())

    def write_weights(self, config: Mapping[str, Any], path: Path) -> None:
        """One tensor after the other. config: config.json."""
        sources = (entry for entry in self.header.tensors.values() if entry.name != ROPE_FACTORS)
        entries = {self.architecture.hugging_face_name(entry.name): entry for entry in sources}

        def load(name: str) -> NDArray[Any]:
            entry = entries[name]
            return self.architecture.restored(entry.name, self.weights.load(entry), config)

        layouts = {name: self.weights.layout(entry) for name, entry in entries.items()}
        write_safetensors(path, layouts, load)


def _token_ids(vocabulary: Vocabulary, architecture: GgufArchitecture) -> dict[str, Any]:
    ids = {
        "bos_token_id": vocabulary.token_id("bos"),
        "eos_token_id": vocabulary.end_ids(architecture.end_tokens) or None,
        "pad_token_id": vocabulary.token_id("padding"),
    }
    return {name: value for name, value in ids.items() if value is not None}


def _work(request: dict[str, Any]) -> dict[str, str]:
    source = Path(request["source"])
    try:
        convert(source, Path(request["target"]))
    except (ModelSourceError, ModelNotSupportedError) as error:
        raise type(error)(f"{source} cannot be converted: {error}") from error
    return {}


if __name__ == "__main__":
    sys.exit(run_helper(_work))
