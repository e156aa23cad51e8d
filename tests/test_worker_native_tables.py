"""Block tables as an array: after any history, what a step reads of it is what the lists hold."""

from __future__ import annotations

import random

import numpy as np
import pytest

from helpers_worker import scheduled_sequence
from trioserve.worker.native_batch import NativeBatches
from trioserve.worker.native_tables import BlockTables


@pytest.mark.parametrize("num_groups", [1, 3])
def test_any_history(num_groups: int) -> None:
    rng = random.Random(num_groups)
    tables = BlockTables(num_groups)
    running: list[list[list[int]]] = []
    largest = 0
    for _ in range(400):
        for own in running:
            for table in own:  # blocks that a window has left are no more to be looked at; others are added
                for place in range(min(len(table), rng.choice([0, 0, 1, 4]))):
                    table[place] = -1
                table.extend(rng.choices(range(1000), k=rng.choice([0, 0, 0, 1, 3])))
        if rng.random() < 0.2 and running:
            running.pop(rng.randrange(len(running)))
        if rng.random() < 0.3:
            running.append([rng.choices(range(1000), k=rng.randint(0, 40)) for _ in range(num_groups)])
        step = rng.sample(running, k=rng.randint(0, len(running)))
        if not step:
            continue
        largest = max(largest, len(step))
        width = max(len(table) for own in step for table in own)
        found = tables.take_in([scheduled_sequence(block_tables=own) for own in step], width)
        assert found.shape == (num_groups, len(step), width)
        assert found.dtype == np.int32
        assert found.flags.c_contiguous
        for index, own in enumerate(step):
            for group, table in enumerate(own):
                pairs = zip(table, found[group, index].tolist(), strict=False)
                assert all(block in {-1, stored} for block, stored in pairs)
        assert len(tables) <= largest * 3 // 2


def test_a_request_that_was_preempted_has_new_tables() -> None:
    tables = BlockTables(1)
    assert tables.take_in([scheduled_sequence(block_tables=[[5, 6]])], 2).tolist() == [[[5, 6]]]
    assert tables.take_in([scheduled_sequence(block_tables=[[7, 8]])], 2).tolist() == [[[7, 8]]]


def test_a_steps_arrays() -> None:
    sequences = [
        scheduled_sequence(start=30, token_ids=[7], block_tables=[[4, 5]]),
        scheduled_sequence(start=14, token_ids=[1, 2, 3], block_tables=[[9, 8]]),
        scheduled_sequence(start=0, token_ids=[6, 6], block_tables=[[3]]),
    ]
    batch = NativeBatches(1, block_size=16).make(sequences)
    token_ids, positions, starts, block_tables = batch.arrays
    assert token_ids.tolist() == [7, 1, 2, 3, 6, 6]
    assert positions.tolist() == [30, 14, 15, 16, 0, 1]
    assert starts.tolist() == [0, 1, 4, 6]
    assert batch.first_rows == [0, 1, 4]
    assert block_tables[0, :2].tolist() == [[4, 5], [9, 8]]
    assert block_tables[0, 2, 0] == 3
    assert (batch.step.num_tokens, batch.step.num_sequences, batch.step.table_width) == (6, 3, 2)
