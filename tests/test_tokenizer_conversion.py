"""GGUF vocabularies as tokenizer.json."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from helpers_model_sources import GgufFile, byte_vocabulary, sentencepiece_vocabulary
from trioserve.errors import ModelNotSupportedError, ModelSourceError
from trioserve.model_sources.convert_gguf import convert

if TYPE_CHECKING:
    from pathlib import Path


def converted(tmp_path: Path, vocabulary: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and tokenizer_config.json."""
    file = GgufFile()
    file.metadata = {k: v for k, v in file.metadata.items() if not k.startswith("tokenizer.")} | vocabulary
    source, target = file.write(tmp_path / "model.gguf"), tmp_path / "converted"
    target.mkdir()
    convert(source, target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    return Tokenizer.from_file(str(target / "tokenizer.json")), config


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    """What the text is cut into before BPE."""
    alphabet = byte_vocabulary()["tokenizer.ggml.tokens"][:256]
    values = {char: byte for byte, char in enumerate(alphabet)}
    cut = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(values[char] for char in word).decode() for word, _ in cut]


TEXT = "I'm HERE'S  12345 x_y!\n\n  \tend "


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "I|'m| HERE|'|S| | 12345| x|_|y|!|\n\n  |\t|end| "),
        ("smollm", "I|'m| HERE|'|S|  |1|2|3|4|5| x|_|y|!|\n\n  |\t|end| "),
        ("llama-bpe", "I|'m| HERE|'S| | |123|45| x|_y|!\n\n|  |\tend| "),
        ("qwen2", "I|'m| HERE|'S| | |1|2|3|4|5| x|_y|!\n\n|  |\tend| "),
    ],
)
def test_how_text_is_split(tmp_path: Path, pre: str, expected: str) -> None:
    tokenizer, _ = converted(tmp_path, byte_vocabulary(pre))
    assert "|".join(words(tokenizer, TEXT)) == expected
    assert expected.replace("|", "") == TEXT


def test_qwen2_and_llama3_split_as_transformers_does(tmp_path: Path) -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    tokenizer, _ = converted(tmp_path, byte_vocabulary("qwen2"))
    split = json.loads(tokenizer.to_str())["pre_tokenizer"]["pretokenizers"][0]
    assert split["pattern"]["Regex"] == PRETOKENIZE_REGEX


def test_default_is_gpt2(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary()
    del vocabulary["tokenizer.ggml.pre"]
    tokenizer, _ = converted(tmp_path, vocabulary)
    assert words(tokenizer, "a 123") == ["a", " 123"]


def test_merges_and_added_tokens(tmp_path: Path) -> None:
    tokenizer, _ = converted(tmp_path, byte_vocabulary("gpt-2"))
    encoded = tokenizer.encode("hello w 12<|end|><think>")
    assert encoded.tokens == ["hell", "o", "Ġw", "Ġ", "12", "<|end|>", "<think>"]
    # A control token is hidden from text, a user-defined one is part of it.
    assert tokenizer.decode(encoded.ids) == "hello w 12<think>"
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "hello w 12<|end|><think>"


def test_digits_are_single_before_merges(tmp_path: Path) -> None:
    tokenizer, _ = converted(tmp_path, byte_vocabulary("smollm"))
    assert tokenizer.encode("12").tokens == ["1", "2"]


def test_ids_are_the_files(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary()
    tokenizer, _ = converted(tmp_path, vocabulary)
    tokens = vocabulary["tokenizer.ggml.tokens"]
    assert [tokenizer.id_to_token(index) for index in range(len(tokens))] == tokens
    assert tokenizer.get_vocab_size() == len(tokens)


def test_an_added_token_with_characters_outside_the_alphabet(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary()
    vocabulary["tokenizer.ggml.tokens"][-1] = "<| a b |>"
    tokenizer, _ = converted(tmp_path, vocabulary)
    assert tokenizer.encode("x<| a b |>y").ids[1] == len(vocabulary["tokenizer.ggml.tokens"]) - 1


def test_llama3_takes_known_words_whole(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary("llama-bpe")
    vocabulary["tokenizer.ggml.merges"] = ["l l"]  # nothing leads to "hell"
    tokenizer, _ = converted(tmp_path, vocabulary | {"tokenizer.ggml.add_bos_token": False})
    assert tokenizer.encode("hell").tokens == ["hell"]


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    tokenizer, _ = converted(tmp_path, byte_vocabulary("qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301").ids) == "\u00e9"


@pytest.mark.parametrize(
    ("pre", "flag", "added"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_bos(tmp_path: Path, pre: str, flag: bool | None, added: bool) -> None:
    vocabulary = byte_vocabulary(pre)
    if flag is not None:
        vocabulary["tokenizer.ggml.add_bos_token"] = flag
    tokenizer, config = converted(tmp_path, vocabulary)
    assert tokenizer.encode("x").tokens == (["<|turn|>", "x"] if added else ["x"])
    assert tokenizer.encode("x", add_special_tokens=False).tokens == ["x"]
    assert config["add_bos_token"] is added


def test_tokenizer_config(tmp_path: Path) -> None:
    _, config = converted(tmp_path, byte_vocabulary() | {"tokenizer.ggml.padding_token_id": 3})
    assert (config["bos_token"], config["eos_token"]) == ("<|turn|>", "<|end|>")
    assert config["pad_token"] == byte_vocabulary()["tokenizer.ggml.tokens"][3]
    assert "unk_token" not in config
    assert config["chat_template"] == "{{ messages[0]['content'] }}"


def test_an_unknown_splitting(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupportedError, match=r"'jabber'.*smollm"):
        converted(tmp_path, byte_vocabulary("jabber"))


def test_an_unknown_kind_of_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupportedError, match=r"'rwkv'.*gpt2"):
        converted(tmp_path, byte_vocabulary() | {"tokenizer.ggml.model": "rwkv"})


def test_a_token_id_outside_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=re.escape("eos_token_id 9999")):
        converted(tmp_path, byte_vocabulary() | {"tokenizer.ggml.eos_token_id": 9999})


# SentencePiece


def test_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    tokenizer, config = converted(tmp_path, sentencepiece_vocabulary())
    assert tokenizer.encode("hello w").tokens == ["<s>", "▁hello", "▁w"]
    euro = ["<0xE2>", "<0x82>", "<0xAC>"]
    assert tokenizer.encode("€", add_special_tokens=False).tokens == ["▁", *euro]
    assert tokenizer.decode(tokenizer.encode("hello € w").ids) == "hello € w"
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    assert config["add_bos_token"] is True


def test_a_sentencepiece_vocabulary_without_prefix_space(tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary() | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer, _ = converted(tmp_path, vocabulary)
    assert tokenizer.encode("hello w", add_special_tokens=False).tokens == ["hello", "▁w"]
    assert tokenizer.decode(tokenizer.encode(" w hello").ids) == " w hello"
