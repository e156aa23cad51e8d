"""A tokenizer in which a token is a byte: token id = byte, 256 = <eos> (special)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from trioserve.config import GenerationDefaults, ResolvedModel
from trioserve.frontend.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

EOS = 256
VOCAB_SIZE = 257

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_backend() -> tokenizers.Tokenizer:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return backend


def byte_tokenizer() -> Tokenizer:
    return Tokenizer(byte_backend(), {"eos_token": "<eos>"}, CHAT_TEMPLATE)


def save_byte_tokenizer(directory: Path) -> None:
    byte_backend().save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def byte_model(
    directory: str, *, context_length: int, architecture: str = "LlamaForCausalLM"
) -> ResolvedModel:
    """A model that is served with this tokenizer, which lies in `directory`."""
    return ResolvedModel(
        directory=directory,
        tokenizer_directory=directory,
        architecture=architecture,
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        context_length=context_length,
        max_model_len=context_length,
        eos_token_ids=(EOS,),
        generation=GenerationDefaults(),
    )
