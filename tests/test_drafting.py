from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.config import SpeculativeConfig
from trioserve.core.drafting import NgramDrafter, make_drafter

A, B, C, D, E, X, Y = range(1, 8)


def propose(token_ids: list[int], limit: int = 3, *, min_ngram: int = 2, max_ngram: int = 3) -> list[int]:
    return NgramDrafter(token_ids, min_ngram=min_ngram, max_ngram=max_ngram).propose(limit)


def test_what_followed_the_last_tokens_before_is_proposed():
    assert propose([A, B, C, D, E, X, A, B]) == [C, D, E]
    assert propose([A, B, C, D, E, X, A, B], limit=1) == [C]
    assert propose([A, B, C, D, E, X, A, B], limit=0) == []


def test_the_longest_match_counts_even_if_a_shorter_one_is_nearer():
    assert propose([A, B, C, D, X, B, C, E, Y, A, B, C], limit=1) == [D]
    assert propose([A, B, C, D, X, B, C, E, Y, A, B, C], limit=1, max_ngram=2) == [E]


def test_of_equally_long_matches_the_last_counts():
    assert propose([A, B, C, X, A, B, D, X, A, B], limit=1, max_ngram=2) == [D]


def test_a_match_must_have_min_ngram_tokens():
    assert propose([A, B, C, X, B]) == []
    assert propose([A, B, C, X, B], min_ngram=1) == [C, X, B]


def test_nothing_is_proposed_without_a_match():
    assert propose([A, B, C, D]) == []
    assert propose([A]) == []
    assert propose([]) == []
    assert propose([A, B]) == []


def test_a_pattern_is_repeated_beyond_the_end():
    assert propose([X, A, B, C, A, B, C], limit=4) == [A, B, C, A]
    assert propose([A, A, A], limit=4) == [A, A, A, A]


@st.composite
def _sequences(draw: st.DrawFn) -> list[int]:
    """Few different tokens, so that much of it occurs again."""
    return draw(st.lists(st.integers(0, draw(st.integers(0, 3))), max_size=40))


ngrams = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def _brute_force(token_ids: list[int], min_ngram: int, max_ngram: int, limit: int) -> list[int]:
    for size in range(max_ngram, min_ngram - 1, -1):
        suffix = token_ids[-size:]
        for end in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[end - size : end] == suffix:
                copy = list(token_ids)
                for offset in range(limit):
                    copy.append(copy[end + offset])
                return copy[len(token_ids) :]
    return []


@given(_sequences(), ngrams, st.integers(1, 4))
def test_proposals_are_those_of_a_search_from_the_end(token_ids, sizes, limit):
    expected = _brute_force(token_ids, *sizes, limit)
    assert propose(token_ids, limit, min_ngram=sizes[0], max_ngram=sizes[1]) == expected


@given(st.lists(_sequences(), min_size=1, max_size=4), ngrams)
def test_it_does_not_matter_in_which_pieces_tokens_come(pieces, sizes):
    first, *rest = pieces
    drafter = NgramDrafter(first, min_ngram=sizes[0], max_ngram=sizes[1])
    for piece in rest:
        drafter.extend(piece)
    whole = [token for piece in pieces for token in piece]
    assert drafter.propose(4) == propose(whole, 4, min_ngram=sizes[0], max_ngram=sizes[1])


@given(_sequences(), ngrams, st.data())
def test_the_past_changes_how_much_is_proposed_but_not_what(token_ids, sizes, data):
    drafter = NgramDrafter([], min_ngram=sizes[0], max_ngram=sizes[1])
    known: list[int] = []
    while token_ids:
        limit = data.draw(st.integers(0, 9))
        drafts = drafter.propose(limit)
        expected = _brute_force(known, *sizes, limit)
        assert drafts == expected[: len(drafts)]
        assert bool(drafts) == bool(expected)
        count = data.draw(st.integers(1, 5))
        drafter.extend(token_ids[:count])
        known += token_ids[:count]
        token_ids = token_ids[count:]


def test_the_caller_may_keep_and_change_what_it_gave_and_got():
    token_ids = [A, B, C, A, B]
    drafter = NgramDrafter(token_ids, min_ngram=2, max_ngram=3)
    token_ids.append(X)
    drafts = drafter.propose(2)
    drafts.clear()
    assert drafter.propose(2) == [C, A]


def test_good_guesses_make_drafts_longer_and_bad_ones_shorter():
    drafter = NgramDrafter([A] * 5, min_ngram=2, max_ngram=3)
    lengths = []
    for _ in range(4):
        drafts = drafter.propose(16)
        lengths.append(len(drafts))
        drafter.extend([*drafts, A])
    assert lengths == [4, 8, 16, 16]
    lengths = []
    for wrong in range(100, 108):
        lengths.append(len(drafter.propose(16)))
        drafter.extend([wrong, A, A, A])  # the very first guess is wrong; then it matches again
    assert lengths == [16, 16, 8, 4, 2, 1, 1, 1]


def test_a_draft_that_was_cut_off_is_not_a_bad_guess():
    drafter = NgramDrafter([A] * 5, min_ngram=2, max_ngram=3)
    for _ in range(3):
        assert drafter.propose(16) == [A] * 4
        drafter.extend([A])  # only one token was computed


def _generate(prompt: list[int], output: list[int], limit: int) -> tuple[int, int]:
    """Steps it takes to say `output` with drafts, and how many of the drafts were wrong."""
    drafter = NgramDrafter(prompt, min_ngram=2, max_ngram=4)
    num_steps = num_wrong = position = 0
    while position < len(output):
        drafts = drafter.propose(limit)
        num_true = 0
        for draft, token in zip(drafts, output[position:-1], strict=False):
            if draft != token:
                break
            num_true += 1
        drafter.extend(output[position : position + num_true + 1])
        position += num_true + 1
        num_steps += 1
        num_wrong += len(drafts) - num_true
    return num_steps, num_wrong


def test_a_copy_with_changes_takes_few_steps():
    rng = random.Random(1)
    prompt = [rng.randrange(50_000) for _ in range(600)]
    output = [rng.randrange(50_000) if index % 20 == 19 else token for index, token in enumerate(prompt)]
    num_steps, num_wrong = _generate(prompt, output, limit=5)
    assert len(output) / num_steps > 2.5
    assert num_wrong < num_steps


def test_noise_costs_about_one_wrong_draft_per_step():
    rng = random.Random(1)
    # Every pair of tokens has occurred before, and says nothing about what follows.
    prompt = [rng.randrange(10) for _ in range(500)]
    output = [rng.randrange(10) for _ in range(1000)]
    num_steps, num_wrong = _generate(prompt, output, limit=16)
    assert num_wrong < 1.25 * num_steps


def test_a_drafter_is_made_as_configured():
    assert make_drafter(None, [A, B]) is None
    config = SpeculativeConfig(prompt_lookup_min=3, prompt_lookup_max=3)
    for token_ids, drafts in [([A, B, C, D, B, C], []), ([A, B, C, D, A, B, C], [D, A])]:
        drafter = make_drafter(config, token_ids)
        assert drafter is not None
        assert drafter.propose(2) == drafts


@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(0, 2), (3, 2)])
def test_sizes_must_make_sense(min_ngram, max_ngram):
    with pytest.raises(AssertionError):
        NgramDrafter([], min_ngram=min_ngram, max_ngram=max_ngram)
