"""A GGUF file's vocabulary as tokenizer.json and tokenizer_config.json. Runs in the converting process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import processors

from trioserve.model_sources.gguf_byte_level import byte_level_tokenizer, splitting_of
from trioserve.model_sources.gguf_sentencepiece import sentencepiece_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from trioserve.model_sources.gguf_vocabulary import Vocabulary

__all__ = ["build_tokenizer", "tokenizer_config"]


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """tokenizer.json.

    Raises:
      ModelSourceError, ModelNotSupportedError: parts of the vocabulary are missing or unknown.
    """
    is_byte_level = vocabulary.model == "gpt2"
    tokenizer = (byte_level_tokenizer if is_byte_level else sentencepiece_tokenizer)(vocabulary)
    tokenizer.post_processor = _add_bos(vocabulary) if _adds_bos(vocabulary) else None
    return tokenizer


def tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer_config.json."""
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.token("bos"),
        "eos_token": vocabulary.token("eos"),
        "unk_token": vocabulary.token("unknown"),
        "pad_token": vocabulary.token("padding"),
        "add_bos_token": _adds_bos(vocabulary),
        "clean_up_tokenization_spaces": False,
        "chat_template": vocabulary.chat_template,
    }
    return {name: value for name, value in values.items() if value is not None}


def _adds_bos(vocabulary: Vocabulary) -> bool:
    return vocabulary.adds_bos(default=vocabulary.model != "gpt2" or splitting_of(vocabulary).add_bos)


def _add_bos(vocabulary: Vocabulary) -> processors.PostProcessor:
    token, token_id = vocabulary.token("bos"), vocabulary.token_id("bos")
    return processors.TemplateProcessing(
        single=f"{token}:0 $A:0",
        pair=f"{token}:0 $A:0 {token}:1 $B:1",
        special_tokens=[(token, token_id)],
    )
