"""The pages of beams: whatever goes on from whom, each beam finds what it has said."""

from __future__ import annotations

import random

import pytest

from trioserve.worker.beam_pages import BeamPages

PAGE = 4
WIDTH = 5
LENGTH = 40


@pytest.mark.parametrize("seed", range(5))
def test_beams_keep_their_texts(seed: int) -> None:
    """Against a memory that remembers which beam wrote what; with as many pages as there have to be."""
    random_ = random.Random(seed)
    count = WIDTH * (LENGTH // PAGE)
    pages = BeamPages(100, count, PAGE)
    memory: dict[tuple[int, int], int] = {}  # (page, place) -> what was written
    written = iter(range(10_000))
    texts: list[list[int]] = [[]]
    tables = [pages.take(1)]
    for length in range(LENGTH - 1):
        for text, table in zip(texts, tables, strict=True):
            text.append(next(written))
            memory[table[length // PAGE], length % PAGE] = text[-1]
        parents = [random_.randrange(len(texts)) for _ in range(random_.randint(1, WIDTH))]
        tables, copies = pages.fork(tables, parents, length + 1)
        assert not {copy.source for copy in copies} & {copy.target for copy in copies}
        for copy in copies:
            for place in range(PAGE):
                memory[copy.target, place] = memory.get((copy.source, place), -1)
        texts = [list(texts[parent]) for parent in parents]
        for text, table in zip(texts, tables, strict=True):
            assert [memory[table[at // PAGE], at % PAGE] for at in range(len(text))] == text
        last = [table[(length + 1) // PAGE] for table in tables]
        assert len(set(last)) == len(last), "two beams write to one page"
        held = {page for table in tables for page in table}
        assert held <= set(range(100, 100 + count))
        assert pages.num_free == count - len(held)
    tables, _ = pages.fork(tables, [], LENGTH - 1)
    assert (tables, pages.num_free) == ([], count)
