"""Tokenizers of GGUF files against transformers' own conversion of the same file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from helpers_model_sources import GgufFile, byte_vocabulary, gemma_vocabulary, sentencepiece_vocabulary
from trioserve.model_sources.convert_gguf import convert

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

# None has characters to compose: transformers leaves out that Qwen's own tokenizer composes them.
TEXTS = [
    "",
    " ",
    "the table",
    "  the    hello",
    "hello      the     hell",
    "a\n\n\n\nb\n c\t\t\td",
    "<table>abc<table>  <tab",
    "<start_of_turn>the<end_of_turn>\nhello<bos>",
    "<|turn|>hell<|end|><think> w",
    "é€ \u00a0\u2028 🫠🥹 東京",
    "▁the ▁▁ hello▁",
    "\x00\x01\x7f\r\n",
    "I'm HERE'S 12345 x_y!\n\n  \tend ",
    "helloello  hell o",
]
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, sentencepiece": ("llama", sentencepiece_vocabulary()),
    "gemma3": ("gemma3", gemma_vocabulary()),
    "qwen2": ("qwen2", byte_vocabulary("qwen2") | {"tokenizer.ggml.add_bos_token": False}),
}


def both(
    architecture: str, vocabulary: dict[str, Any], tmp_path: Path
) -> tuple[Tokenizer, PreTrainedTokenizerBase]:
    from transformers import AutoTokenizer

    file = GgufFile(architecture=architecture)
    file.metadata = {k: v for k, v in file.metadata.items() if not k.startswith("tokenizer.")} | vocabulary
    source, target = file.write(tmp_path / "model.gguf"), tmp_path / "converted"
    target.mkdir()
    convert(source, target)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=source.name)
    return Tokenizer.from_file(str(target / "tokenizer.json")), theirs


@pytest.mark.parametrize(("architecture", "vocabulary"), FILES.values(), ids=FILES)
def test_ids_and_texts_are_transformers(
    architecture: str, vocabulary: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = both(architecture, vocabulary, tmp_path)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text).ids == ids, text
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


def test_text_that_looks_like_a_byte_token_is_text(tmp_path: Path) -> None:
    """Two of the pieces here, `<0` and `x0A>`, spell a byte's token, and do not merge into it."""
    ours, _ = both("gemma3", gemma_vocabulary(), tmp_path)
    encoded = ours.encode("<0x0A>", add_special_tokens=False)
    assert encoded.tokens == ["<0", "x0A>"]
    assert ours.decode(encoded.ids) == "<0x0A>"
