"""Text to token ids and back, by the `tokenizers` library alone: no transformers, no torch."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from trioserve.errors import ModelNotSupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Tokenizer"]

_TOKEN_CACHE_SIZE = 2**16

_MAX_CHARACTERS_PER_TOKEN = 128
"""No vocabulary has tokens that are longer on average."""


class Tokenizer:
    """A model's tokenizer and what belongs to it: special tokens and chat template."""

    def __init__(
        self, backend: tokenizers.Tokenizer, config: dict[str, Any], chat_template: str | None
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        """Jinja source, None if the model brings none."""
        self.bos_token = _token_text(config.get("bos_token"))
        self.eos_token = _token_text(config.get("eos_token"))
        self.added_tokens: Mapping[str, int] = {
            token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()
        }
        """Those beside the vocabulary proper, the special ones among them: text -> id."""
        self.special_tokens = frozenset(
            token.content for token in backend.get_added_tokens_decoder().values() if token.special
        )
        """Those of them that `skip_special_tokens` leaves out."""
        self._to_bytes = _token_decoder(backend)
        self.token_text: Callable[[int], str] = lru_cache(_TOKEN_CACHE_SIZE)(self._token_text)
        self.plain_text: Callable[[int], str | None] = lru_cache(_TOKEN_CACHE_SIZE)(self._plain_text)
        """What this token adds to any text that ends with a whole character; None where that cannot be said
        of the token alone."""
        self._added_ids = frozenset(self.added_tokens.values())
        self._joins_bytes = _decoder_settings(backend).get("type") == "ByteLevel"

    @classmethod
    def from_directory(cls, directory: str) -> Tokenizer:
        """Read tokenizer.json (required), tokenizer_config.json and chat_template.jinja. Blocking.

        Raises:
          ModelNotSupportedError: there is no readable tokenizer.json.
        """
        # Unless told otherwise, the library starts a thread pool that nothing can end.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        path = Path(directory)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
            backend.no_truncation()  # whoever saved it may have left these on
            backend.no_padding()
        except Exception as error:  # the library raises bare Exception for whatever is wrong
            raise ModelNotSupportedError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
        config_path = path / "tokenizer_config.json"
        config = json.loads(config_path.read_text()) if config_path.exists() else {}
        return cls(backend, config, _read_chat_template(path, config))

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`. Blocking: about 1 ms per 2,500 characters, without the GIL.

        (The library's plain `encode` would hold the GIL, so that a thread would not help.)
        """
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_plainly(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """Of each text, without special tokens, which `finish` adds. Blocking, as `encode`."""
        return self.backend.encode_batch_fast(list(texts), add_special_tokens=False)

    def finish(
        self, first: tokenizers.Encoding, second: tokenizers.Encoding | None = None
    ) -> tokenizers.Encoding:
        """One text, or a pair of them, with special tokens and type ids."""
        return self.backend.post_process(first, second, True)

    def num_special_tokens(self, *, is_pair: bool) -> int:
        """How many `finish` adds."""
        return self.backend.num_special_tokens_to_add(is_pair)

    def beginnings(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """The characters of each text's first `max_tokens` tokens. Blocking, as `encode`."""
        texts = [text[: max_tokens * _MAX_CHARACTERS_PER_TOKEN] for text in texts]
        encodings = self.backend.encode_batch(texts, add_special_tokens=False)
        return [
            text if len(encoding) <= max_tokens else text[: encoding.offsets[max_tokens - 1][1]]
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that form no character become U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What this token alone stands for; a part of a character is given as its bytes."""
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else self._to_bytes(token)

    def spelling(self, token_id: int) -> str:
        """The token as the vocabulary has it, with its marks for spaces; empty if there is no such token."""
        return self.backend.id_to_token(token_id) or ""

    def _plain_text(self, token_id: int) -> str | None:
        # A byte-level decoder joins the bytes of tokens, whatever is beside them. Others look for beginnings
        # and fill in spaces; and added tokens may be special.
        if not self._joins_bytes or token_id in self._added_ids:
            return None
        text = self.backend.decode([token_id], skip_special_tokens=False)
        return None if "\ufffd" in text else text

    def _token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def _token_text(token: Any) -> str | None:
    """tokenizer_config.json has special tokens as text or as an object with the text as `content`."""
    if isinstance(token, dict):
        return str(token["content"])
    return None if token is None else str(token)


def _read_chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _decoder_settings(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """As tokenizer.json has them, of which `backend.to_str()` would write and read all."""
    settings: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    return settings


def _token_decoder(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """How a token's spelling in the vocabulary becomes bytes, by the kind of decoder the tokenizer has."""
    decoder = _decoder_settings(backend)
    kinds = {step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step}
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    if "ByteLevel" in kinds:
        return lambda token: token.encode() if token in special else _byte_level_bytes(token)
    if "ByteFallback" in kinds:
        return lambda token: token.encode() if token in special else _byte_fallback_bytes(token)
    return lambda token: token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others are moved above U+0100.

    Source: `bytes_to_unicode` of the GPT-2 release, https://github.com/openai/gpt-2, src/encoder.py.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    return b"".join(
        bytes([_BYTE_LEVEL[character]]) if character in _BYTE_LEVEL else character.encode()
        for character in token
    )


def _byte_fallback_bytes(token: str) -> bytes:
    """SentencePiece: `<0xE2>` is a byte, and U+2581 a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
