"""The `tokenizer.*` part of a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs
from tokenizers import AddedToken

from trioserve.errors import ModelNotSupportedError, ModelSourceError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CONTROL", "NORMAL", "USER_DEFINED", "Vocabulary"]

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Values in tokenizer.ggml.token_type. The last two are found whole in text, and hidden from it or not."""

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
    def kinds(self) -> list[int]:
        """One per token."""
        return self._numbers("token_type", default=NORMAL)

    @property
    def scores(self) -> list[float]:
        """One per token; SentencePiece only."""
        return self._numbers("scores")

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
        return [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(self.tokens, self.kinds, strict=True)
            if kind in {CONTROL, USER_DEFINED}
        ]

    def adds_bos(self, *, default: bool) -> bool:
        """Whether a text begins with BOS; `default` where the file does not say."""
        return bool(self._get("add_bos_token", default)) and self.token_id("bos") is not None

    @property
    def adds_space(self) -> bool:
        """SentencePiece only: whether text is read as if it began with a space."""
        return bool(self._get("add_space_prefix", True))

    @property
    def chat_template(self) -> str | None:
        return self._metadata.get("tokenizer.chat_template")

    def end_ids(self, known: Iterable[str]) -> list[int]:
        """Tokens after which the model has nothing to say: those that the file names as the end of the text,
        of a turn or of a message, and those of the `known` ones that are control tokens here."""
        named = (self._get(f"{name}_token_id") for name in ("eos", "eot", "eom"))
        control = {
            token: index
            for index, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind == CONTROL
        }
        found = (*named, *(control.get(token) for token in known))
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

    def _numbers(self, key: str, default: int | None = None) -> list[Any]:
        found = self._get(key)
        if found is None and default is not None:
            return [default] * len(self.tokens)
        if not isinstance(found, list) or len(found) != len(self.tokens):
            raise ModelSourceError(f"The file's metadata must have a tokenizer.ggml.{key} for each token.")
        return found
