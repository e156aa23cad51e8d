"""The two shapes in which OpenAI's APIs report logprobs."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from trioserve.server.protocol.chat import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from trioserve.server.protocol.completions import CompletionLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.outputs import Logprob, TokenLogprobs

__all__ = ["TextOffsets", "chat_logprobs", "completion_logprobs"]

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def _most_likely(position: TokenLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The `count` best of a position, best first; the sampled token may not be among them."""
    ranked = sorted(position.items(), key=lambda item: item[1].rank)
    return [(token_id, entry) for token_id, entry in ranked if entry.rank <= count][:count]


def chat_logprobs(positions: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer) -> ChatLogprobs:
    """One entry per position, each with the `num_top` most likely tokens."""
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
        return start


def completion_logprobs(
    positions: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer, offsets: TextOffsets
) -> CompletionLogprobs:
    """One entry per position; `offsets` goes on from chunk to chunk of a choice."""
    columns = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for position in positions:
        token_id, sampled = next(iter(position.items()))
        columns.tokens.append(sampled.decoded_token)
        columns.token_logprobs.append(max(sampled.logprob, _LOWEST))
        columns.top_logprobs.append(_top_by_text(sampled, position, num_top))
        columns.text_offset.append(offsets.advance(tokenizer.token_bytes(token_id)))
    return columns


def _top_by_text(sampled: Logprob, position: TokenLogprobs, num_top: int) -> dict[str, float]:
    """Tokens of equal text fall together: the more likely one stays."""
    top: dict[str, float] = {}
    for entry in [*(entry for _, entry in _most_likely(position, num_top)), sampled]:
        top.setdefault(entry.decoded_token, max(entry.logprob, _LOWEST))
    return top
