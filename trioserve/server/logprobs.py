"""The shapes in which logprobs are reported: OpenAI's two, and vLLM's for those of the prompt."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

import attrs

from trioserve.server.protocol.chat import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from trioserve.server.protocol.completions import CompletionLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.outputs import Logprob, TokenLogprobs

__all__ = ["TextOffsets", "chat_logprobs", "completion_logprobs", "prompt_logprobs"]

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def _most_likely(position: TokenLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The `count` best of a position (-1: all), best first; the sampled token may not be among them."""
    ranked = sorted(position.items(), key=lambda item: item[1].rank)
    if count == -1:
        return ranked
    return [(token_id, entry) for token_id, entry in ranked if entry.rank <= count][:count]


def chat_logprobs(positions: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer) -> ChatLogprobs:
    """One entry per position, each with the `num_top` most likely tokens, -1: with all."""
    return ChatLogprobs([_chat_position(position, num_top, tokenizer) for position in positions])


def _chat_position(position: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> ChatTokenLogprob:
    token_id, sampled = next(iter(position.items()))
    top = [
        ChatTopLogprob(
            entry.decoded_token, max(entry.logprob, _LOWEST), list(tokenizer.token_bytes(other_id))
        )
        for other_id, entry in _most_likely(position, num_top)
    ]
    return ChatTokenLogprob(
        sampled.decoded_token, max(sampled.logprob, _LOWEST), list(tokenizer.token_bytes(token_id)), top
    )


class TextOffsets:
    """Where each token of one choice starts in its text.

    Counted on the tokens' bytes: a token that ends in the middle of a character leaves the offset before it,
    where a count of U+FFFDs would drift.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def advance(self, token: bytes) -> int:
        """The offset of the next token, given its bytes."""
        start = self._characters
        self._characters += len(self._decoder.decode(token))
        return max(start, 0)

    def end_at(self, length: int, tokens: Sequence[bytes]) -> None:
        """`tokens` come next, and end where the first `length` characters do.

        Tokens may spell more than the text that they were made of: a BOS, a space in front. What is too much
        is taken to be at the start.
        """
        self._characters = length - len(b"".join(tokens).decode(errors="replace"))


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[TokenLogprobs | None],
    num_top: int,
    tokenizer: Tokenizer,
    offsets: TextOffsets,
) -> CompletionLogprobs:
    """One entry per token; `offsets` goes on from chunk to chunk of a choice."""
    columns = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token_id, position in zip(token_ids, positions, strict=True):
        columns.tokens.append(tokenizer.token_text(token_id))
        columns.text_offset.append(offsets.advance(tokenizer.token_bytes(token_id)))
        if position is None:
            columns.token_logprobs.append(None)
            columns.top_logprobs.append(None)
        else:
            entry = position[token_id]
            columns.token_logprobs.append(max(entry.logprob, _LOWEST))
            columns.top_logprobs.append(_top_by_text(entry, position, num_top))
    return columns


def _top_by_text(sampled: Logprob, position: TokenLogprobs, num_top: int) -> dict[str, float]:
    """Tokens of equal text fall together: the more likely one stays."""
    top: dict[str, float] = {}
    for entry in [*(entry for _, entry in _most_likely(position, num_top)), sampled]:
        top.setdefault(entry.decoded_token, max(entry.logprob, _LOWEST))
    return top


def prompt_logprobs(positions: Sequence[TokenLogprobs | None]) -> list[TokenLogprobs | None]:
    """As vLLM writes them: the positions' own entries, in numbers that JSON has."""
    return [
        position and {token: _finite(entry) for token, entry in position.items()} for position in positions
    ]


def _finite(entry: Logprob) -> Logprob:
    return entry if entry.logprob >= _LOWEST else attrs.evolve(entry, logprob=_LOWEST)
