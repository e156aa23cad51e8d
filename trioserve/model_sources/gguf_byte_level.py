"""A GGUF file's byte-level BPE vocabulary as a tokenizer.

All of it is in the metadata, but for the splitting of text before BPE, which `tokenizer.ggml.pre` only names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from trioserve.errors import ModelNotSupportedError

if TYPE_CHECKING:
    from trioserve.model_sources.gguf_vocabulary import Vocabulary

__all__ = ["Splitting", "byte_level_tokenizer", "splitting_of"]

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@attrs.frozen(kw_only=True)
class Splitting:
    """How text is cut into words before BPE."""

    pattern: str | None = None
    """None: GPT-2's, which is built into ByteLevel."""
    single_digits: bool = False
    ignore_merges: bool = False
    """A word that is in the vocabulary is taken whole, whatever the merges."""
    normalize: bool = False
    """To Unicode's composed form (NFC)."""
    add_bos: bool = False
    """Where the file does not say."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        if self.pattern is not None:
            split = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
            return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])
        if self.single_digits:
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)])
        return _byte_level(use_regex=True)


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


_GPT2 = Splitting()
_LLAMA3 = Splitting(pattern=_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
_QWEN2 = Splitting(pattern=_QWEN2_SPLIT, normalize=True)

_SPLITTINGS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": Splitting(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}


def splitting_of(vocabulary: Vocabulary) -> Splitting:
    """Raises ModelNotSupportedError if it is not known here."""
    if vocabulary.pre not in _SPLITTINGS:
        raise ModelNotSupportedError(
            f"The file's text is split by {vocabulary.pre!r} (tokenizer.ggml.pre), which is not known here. "
            f"Known are: {', '.join(_SPLITTINGS)}."
        )
    return _SPLITTINGS[vocabulary.pre]


def byte_level_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer, but for what it puts before a text's tokens."""
    splitting = splitting_of(vocabulary)
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    bpe = models.BPE(vocab=ids, merges=vocabulary.merges, ignore_merges=splitting.ignore_merges)
    tokenizer = Tokenizer(bpe)
    if splitting.normalize:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(vocabulary.added_tokens)
    return tokenizer
