"""`python -m trioserve.model_sources.convert_ctranslate2`: the helper process that converts a directory in
CTranslate2's layout."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import tokenizers
from numpy.typing import NDArray

from trioserve.errors import ModelNotSupportedError, ModelSourceError
from trioserve.model_sources.ctranslate2_file import MODEL_FILE, CTranslate2File, read_ctranslate2
from trioserve.model_sources.ctranslate2_whisper import (
    SPECIFICATION,
    Part,
    find_parts,
    generation_config,
    model_config,
)
from trioserve.model_sources.helper_process import run_helper
from trioserve.model_sources.json_files import read_json, write_json
from trioserve.model_sources.safetensors_writer import TensorLayout, write_safetensors

__all__ = ["convert"]

_KINDS = {"float32": ("F32", np.float32), "float16": ("F16", np.float16), "bfloat16": ("BF16", np.uint16)}
_NUM_TIMESTAMPS = 1501
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def convert(source: Path, target: Path) -> None:
    """Convert the Whisper model in the directory `source` into the (empty) directory `target`.

    Written are config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
    model.safetensors, with the numbers as they are stored. The tokenizer gets timestamps as special tokens,
    where it lacks them.

    Raises:
      ModelSourceError: something is damaged or lacking.
      ModelNotSupportedError: it is another kind of model, or quantized.
    """
    weights = _Weights.of(source / MODEL_FILE)
    tokenizer = _tokenizer(source / "tokenizer.json")
    tokens = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    generation = generation_config(read_json(source / "config.json"), tokens)
    heads = {side: weights.scalar(f"{side}/num_heads") for side in ("encoder", "decoder")}
    config = model_config(weights.file, heads) | {name: generation[name] for name in _TOKEN_IDS}
    write_json(target / "config.json", config)
    write_json(target / "generation_config.json", generation)
    write_json(target / "tokenizer_config.json", {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"})
    tokenizer.save(str(target / "tokenizer.json"))
    weights.write(target / "model.safetensors")


def _tokenizer(path: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever is wrong
        raise ModelSourceError(f"{path.name} cannot be read ({error})") from error
    names = [f"<|{index * 0.02:.2f}|>" for index in range(_NUM_TIMESTAMPS)]
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in names])
    return tokenizer


@attrs.frozen(eq=False)
class _Weights:
    file: CTranslate2File
    data: NDArray[np.uint8]
    """The whole file, mapped."""

    @classmethod
    def of(cls, path: Path) -> _Weights:
        file = read_ctranslate2(path)
        if file.specification != SPECIFICATION:
            raise ModelNotSupportedError(
                f"it is a {file.specification} of CTranslate2; supported is {SPECIFICATION}"
            )
        return cls(file, np.memmap(path, np.uint8, "r"))

    def scalar(self, name: str) -> int:
        entry = self.file.tensors.get(name)
        if entry is None:
            raise ModelSourceError(f"it has no {name}")
        return int(self.data[entry.offset : entry.offset + entry.num_bytes].view(entry.dtype)[0])

    def write(self, path: Path) -> None:
        parts = find_parts(self.file)
        layouts = {name: self._layout(part) for name, part in parts.items()}
        write_safetensors(path, layouts, lambda name: self._load(parts[name], layouts[name]))

    def _layout(self, part: Part) -> TensorLayout:
        entry = self.file.tensors[part.source]
        rows, *others = entry.shape
        return TensorLayout(_KINDS[entry.dtype][0], (rows // part.count, *others))

    def _load(self, part: Part, layout: TensorLayout) -> NDArray[Any]:
        entry = self.file.tensors[part.source]
        if entry.num_bytes != layout.num_bytes * part.count:
            raise ModelSourceError(
                f"{part.source} has {entry.num_bytes} bytes, and its shape is {entry.shape}"
            )
        start = entry.offset + part.index * layout.num_bytes
        size = math.prod(layout.shape) * np.dtype(_KINDS[entry.dtype][1]).itemsize
        return self.data[start : start + size].view(_KINDS[entry.dtype][1]).reshape(layout.shape)


def _work(request: dict[str, Any]) -> dict[str, str]:
    source = Path(request["source"])
    try:
        convert(source, Path(request["target"]))
    except (ModelSourceError, ModelNotSupportedError) as error:
        raise type(error)(f"{source} cannot be converted: {error}.") from error
    except (KeyError, ValueError) as error:  # of config.json or the tokenizer
        raise ModelSourceError(f"{source} cannot be converted: {error!r}.") from error
    return {}


if __name__ == "__main__":
    sys.exit(run_helper(_work))
