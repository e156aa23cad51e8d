"""A GGUF file's vocabulary as tokenizer.json and tokenizer_config.json.

A byte-level BPE (`gpt2`) is all there in the metadata, but for the splitting of text before BPE, which
`tokenizer.ggml.pre` only names. A SentencePiece vocabulary (`llama`) has no merges in the file; transformers
finds them again. Runs in the converting process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from trioserve.errors import ModelNotSupportedError, ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Vocabulary", "build_tokenizer", "tokenizer_config"]

_CONTROL, _USER_DEFINED = 3, 4
"""Values in tokenizer.ggml.token_type: found whole in text, and hidden from it or not."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@attrs.frozen(kw_only=True)
class _Splitting:
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


_GPT2 = _Splitting()
_LLAMA3 = _Splitting(pattern=_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
_QWEN2 = _Splitting(pattern=_QWEN2_SPLIT, normalize=True)

_SPLITTINGS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _Splitting(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}

_Role = Literal["bos", "eos", "unknown", "padding"]


@attrs.frozen
class Vocabulary:
    """The `tokenizer.*` part of a file's metadata.

    Raises:
      ModelNotSupportedError: on construction, if the vocabulary is of a kind that cannot be converted.
    """

    _metadata: Mapping[str, Any]

    def __attrs_post_init__(self) -> None:
        if self.model not in {"gpt2", "llama"}:
            raise ModelNotSupportedError(
                f"The file's vocabulary is of the kind {self.model!r} (tokenizer.ggml.model), which is not "
                "supported. Supported are: gpt2, llama."
            )
        if self.model == "gpt2" and self.pre not in _SPLITTINGS:
            raise ModelNotSupportedError(
                f"The file's text is split by {self.pre!r} (tokenizer.ggml.pre), which is not known here. "
                f"Known are: {', '.join(_SPLITTINGS)}."
            )

    @property
    def model(self) -> str:
        """`gpt2` is byte-level BPE, `llama` is SentencePiece."""
        return str(self._get("model"))

    @property
    def pre(self) -> str:
        return str(self._get("pre", "default"))

    @property
    def tokens(self) -> list[str]:
        return self._list("tokens")

    @property
    def merges(self) -> list[tuple[str, str]]:
        # The first half may begin with a space of its own.
        return [
            (merge[:cut], merge[cut + 1 :])
            for merge in self._list("merges")
            if (cut := merge.find(" ", 1)) > 0
        ]

    @property
    def added_tokens(self) -> list[AddedToken]:
        """Tokens that are found whole in text, by id."""
        kinds = self._get("token_type", [])
        return [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(self.tokens, kinds, strict=False)
            if kind in {_CONTROL, _USER_DEFINED}
        ]

    @property
    def splitting(self) -> _Splitting:
        return _SPLITTINGS[self.pre]

    @property
    def adds_bos(self) -> bool:
        default = self.model == "llama" or self.splitting.add_bos
        return bool(self._get("add_bos_token", default)) and self.token_id("bos") is not None

    @property
    def adds_space(self) -> bool:
        """SentencePiece only: whether text is read as if it began with a space."""
        return bool(self._get("add_space_prefix", True))

    @property
    def chat_template(self) -> str | None:
        return self._metadata.get("tokenizer.chat_template")

    @property
    def end_ids(self) -> list[int]:
        """Tokens after which the model has nothing to say: of the text, of a turn, of a message."""
        found = (self._get(f"{name}_token_id") for name in ("eos", "eot", "eom"))
        return list(dict.fromkeys(token for token in found if isinstance(token, int)))

    def token_id(self, role: _Role) -> int | None:
        found: int | None = self._get(f"{role}_token_id")
        if found is not None and not 0 <= found < len(self.tokens):
            raise ModelSourceError(f"The file's {role}_token_id {found} is outside its vocabulary.")
        return found

    def token(self, role: _Role) -> str | None:
        found = self.token_id(role)
        return None if found is None else self.tokens[found]

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _list(self, key: str) -> list[str]:
        found = self._get(key)
        if not isinstance(found, list):
            raise ModelSourceError(f"The file's metadata has no tokenizer.ggml.{key}.")
        return found


def build_tokenizer(vocabulary: Vocabulary, path: Path) -> Tokenizer:
    """The tokenizer of the GGUF file `path`."""
    if vocabulary.model == "gpt2":
        tokenizer = _byte_level_bpe(vocabulary)
    else:
        tokenizer = _sentencepiece(path)
        if not vocabulary.adds_space:
            _keep_beginning(tokenizer)
    tokenizer.post_processor = _add_bos(vocabulary) if vocabulary.adds_bos else None
    return tokenizer


def tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer_config.json."""
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.token("bos"),
        "eos_token": vocabulary.token("eos"),
        "unk_token": vocabulary.token("unknown"),
        "pad_token": vocabulary.token("padding"),
        "add_bos_token": vocabulary.adds_bos,
        "clean_up_tokenization_spaces": False,
        "chat_template": vocabulary.chat_template,
    }
    return {name: value for name, value in values.items() if value is not None}


def _byte_level_bpe(vocabulary: Vocabulary) -> Tokenizer:
    splitting = vocabulary.splitting
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    bpe = models.BPE(vocab=ids, merges=vocabulary.merges, ignore_merges=splitting.ignore_merges)
    tokenizer = Tokenizer(bpe)
    if splitting.normalize:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(vocabulary.added_tokens)
    return tokenizer


def _sentencepiece(path: Path) -> Tokenizer:
    # Seconds of imports, for files of this kind only.
    from transformers import AutoTokenizer  # noqa: PLC0415

    loaded = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer: Tokenizer = loaded.backend_tokenizer
    return tokenizer


def _keep_beginning(tokenizer: Tokenizer) -> None:
    """Undo what transformers takes for granted: that a space is put before the text, and taken off again."""
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )


def _add_bos(vocabulary: Vocabulary) -> processors.PostProcessor:
    token, token_id = vocabulary.token("bos"), vocabulary.token_id("bos")
    return processors.TemplateProcessing(
        single=f"{token}:0 $A:0",
        pair=f"{token}:0 $A:0 {token}:1 $B:1",
        special_tokens=[(token, token_id)],
    )
