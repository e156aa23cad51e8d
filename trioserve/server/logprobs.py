"""The shapes in which logprobs are reported: OpenAI's two, and vLLM's for those of the prompt."""

from __future__ import annotations

import codecs
from collections.abc import Collection
from typing import TYPE_CHECKING

import attrs

from trioserve.frontend.tokenizer import Tokenizer
from trioserve.server.protocol.chat import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from trioserve.server.protocol.completions import CompletionLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.outputs import Logprob, TokenLogprobs

__all__ = ["LogprobColumns", "TextOffsets", "chat_logprobs", "prompt_logprobs"]

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def _reported(position: TokenLogprobs, count: int, also: Collection[int]) -> list[tuple[int, Logprob]]:
    """The `count` best of a position (-1: all), best first, and then those of `also`; the sampled token may
    not be among them."""
    ranked = sorted(position.items(), key=lambda item: item[1].rank)
    if count == -1:
        return ranked
    best = [(token_id, entry) for token_id, entry in ranked if entry.rank <= count][:count]
    if not also:
        return best
    known = {token_id for token_id, _ in best}
    named = ((token_id, position.get(token_id)) for token_id in also if token_id not in known)
    return best + [(token_id, entry) for token_id, entry in named if entry is not None]


def _name(token_id: int, text: str, *, by_id: bool) -> str:
    return f"token_id:{token_id}" if by_id else text


def chat_logprobs(
    positions: Sequence[TokenLogprobs],
    num_top: int,
    tokenizer: Tokenizer,
    *,
    also: Collection[int] = (),
    by_id: bool = False,
) -> ChatLogprobs:
    """One entry per position, each with the `num_top` most likely tokens, -1: with all; and with those of
    `also`. With `by_id` tokens are named as "token_id:42"; their bytes stay what they are."""

    def describe(token_id: int, entry: Logprob) -> ChatTopLogprob:
        return ChatTopLogprob(
            _name(token_id, entry.decoded_token, by_id=by_id),
            max(entry.logprob, _LOWEST),
            list(tokenizer.token_bytes(token_id)),
        )

    content = []
    for position in positions:
        sampled = describe(*next(iter(position.items())))
        top = [describe(*item) for item in _reported(position, num_top, also)]
        content.append(ChatTokenLogprob(sampled.token, sampled.logprob, sampled.bytes, top))
    return ChatLogprobs(content)


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


@attrs.frozen(kw_only=True)
class LogprobColumns:
    """How logprobs are written in completions."""

    tokenizer: Tokenizer
    num_top: int
    """The most likely tokens that are told of each position."""
    also: Collection[int] = ()
    """Tokens that are told, too."""
    by_id: bool = False
    """Tokens are named as "token_id:42"."""

    def write(
        self,
        token_ids: Sequence[int],
        positions: Sequence[TokenLogprobs | None],
        offsets: TextOffsets,
    ) -> CompletionLogprobs:
        """One entry per token; `offsets` goes on from chunk to chunk of a choice."""
        columns = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, position in zip(token_ids, positions, strict=True):
            columns.tokens.append(_name(token_id, self.tokenizer.token_text(token_id), by_id=self.by_id))
            columns.text_offset.append(offsets.advance(self.tokenizer.token_bytes(token_id)))
            if position is None:
                columns.token_logprobs.append(None)
                columns.top_logprobs.append(None)
            else:
                columns.token_logprobs.append(max(position[token_id].logprob, _LOWEST))
                columns.top_logprobs.append(self._top_by_name(token_id, position))
        return columns

    def _top_by_name(self, sampled: int, position: TokenLogprobs) -> dict[str, float]:
        """Tokens of one name fall together: the more likely one stays."""
        top: dict[str, float] = {}
        told = _reported(position, self.num_top, self.also)
        for token_id, entry in [*told, (sampled, position[sampled])]:
            name = _name(token_id, entry.decoded_token, by_id=self.by_id)
            top.setdefault(name, max(entry.logprob, _LOWEST))
        return top


def prompt_logprobs(positions: Sequence[TokenLogprobs | None]) -> list[TokenLogprobs | None]:
    """As vLLM writes them: the positions' own entries, in numbers that JSON has."""
    return [
        position and {token: _finite(entry) for token, entry in position.items()} for position in positions
    ]


def _finite(entry: Logprob) -> Logprob:
    return entry if entry.logprob >= _LOWEST else attrs.evolve(entry, logprob=_LOWEST)
