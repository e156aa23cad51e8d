"""Guessing what a sequence will say, from what it has said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.config import SpeculativeConfig

__all__ = ["Drafter", "NgramDrafter", "make_drafter"]

_FIRST_REACH = 4


class Drafter(Protocol):
    """Of one sequence. It guesses definite tokens, not a distribution: they are checked by drawing as if
    there were no drafts, and comparing (see `trioserve.worker.sampler`)."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """These tokens are now known to follow what was known before."""
        ...

    def propose(self, limit: int) -> list[int]:
        """The tokens most likely to come next, at most `limit`; none if there is no good guess."""
        ...


def make_drafter(config: SpeculativeConfig | None, token_ids: Sequence[int]) -> Drafter | None:
    """For a sequence of which `token_ids` are known; None where nothing is to be guessed."""
    if config is None:
        return None
    return NgramDrafter(token_ids, min_ngram=config.prompt_lookup_min, max_ngram=config.prompt_lookup_max)


class NgramDrafter:
    """Prompt lookup: what followed the last few tokens when they last occurred.

    The longest n-gram is looked up with which the sequence ends and which has occurred before; of its
    occurrences the last one before the end counts, and what followed it is copied. A copy that reaches the
    end of the sequence goes on with itself, so that a pattern is repeated for as long as asked:

        a b c d e a b c          "a b c" was followed by "d e a b c", and then by "d e a b c" again
        -----     -----

    How many tokens it offers (its reach) follows from how it fared. A guess that came true to its end doubles
    the reach; one that did not halves it, though not below one more than what came true of it. So where text
    is copied, drafts soon are as long as they may be, and where it is not, a wrong guess costs one token.

    Cost: each token of the sequence, however long that is, adds at most one dictionary entry (120 bytes or
    so) for each of the sizes min_ngram to max_ngram; small beside its KV cache, which takes kilobytes.
    """

    def __init__(self, token_ids: Sequence[int], *, min_ngram: int, max_ngram: int) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._token_ids = list(token_ids)
        # For each size, where the last occurrence of each n-gram ended, that is where what followed it lies.
        # Not of the n-grams at the end: nothing has followed those yet.
        self._followers = [_followers(self._token_ids, size) for size in self._sizes]
        self._reach = _FIRST_REACH
        self._guess: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        if self._guess:
            self._learn(token_ids)
        for token_id in token_ids:
            end = len(self._token_ids)
            for size, followers in zip(self._sizes, self._followers, strict=True):
                if size <= end:
                    followers[tuple(self._token_ids[end - size :])] = end
            self._token_ids.append(token_id)

    def _learn(self, token_ids: Sequence[int]) -> None:
        """What of the last guess was not cut off has come true, or the first wrong token shows it."""
        guess, self._guess = self._guess, []
        num_true = 0
        for guessed, token_id in zip(guess, token_ids, strict=False):
            if guessed != token_id:
                self._reach = max(num_true + 1, self._reach // 2)
                return
            num_true += 1
        self._reach = max(self._reach, 2 * num_true)

    def propose(self, limit: int) -> list[int]:
        start = self._find_follower()
        self._guess = [] if start is None else self._copy(start, min(limit, self._reach))
        return list(self._guess)

    def _find_follower(self) -> int | None:
        end = len(self._token_ids)
        for size, followers in zip(self._sizes, self._followers, strict=True):
            if size < end:
                start = followers.get(tuple(self._token_ids[end - size :]))
                if start is not None:
                    return start
        return None

    def _copy(self, start: int, count: int) -> list[int]:
        copied = self._token_ids[start : start + count]
        num_repeats = -(-count // len(copied)) if count > 0 else 0
        return (copied * num_repeats)[:count]


def _followers(token_ids: list[int], size: int) -> dict[tuple[int, ...], int]:
    """The end of the last occurrence of each n-gram, those apart that nothing follows."""
    ngrams = zip(*(token_ids[offset:] for offset in range(size)), strict=False)
    return dict(zip(ngrams, range(size, len(token_ids)), strict=False))
