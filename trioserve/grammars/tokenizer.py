"""A model's vocabulary, as llguidance wants it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llguidance import LLTokenizer

from trioserve.errors import ModelNotSupportedError

if TYPE_CHECKING:
    from trioserve.config import ResolvedModel

__all__ = ["load_tokenizer"]


def load_tokenizer(model: ResolvedModel) -> LLTokenizer:
    """Blocking, and the GIL is held all the while: 0.25 s for 49 k tokens, 2 s and 260 MB for 262 k.

    A tokenizer may know more tokens than the model has logits for (Gemma's do): those are never allowed.

    Raises:
      ModelNotSupportedError: llguidance cannot read the model's tokenizer.json.
    """
    path = str(Path(model.tokenizer_directory) / "tokenizer.json")
    # Without any, llguidance takes what the tokenizer calls by one of the usual names.
    eos_token_ids = list(model.eos_token_ids) or None
    try:
        return LLTokenizer(path, n_vocab=model.vocab_size, eos_token=eos_token_ids)
    except ValueError as error:
        if "vocab size too small" not in str(error):
            raise _not_supported(path, error) from error
    try:
        return LLTokenizer(path, eos_token=eos_token_ids)
    except ValueError as error:
        raise _not_supported(path, error) from error


def _not_supported(path: str, error: ValueError) -> ModelNotSupportedError:
    return ModelNotSupportedError(f"{path} cannot be used for structured outputs: {error}")
