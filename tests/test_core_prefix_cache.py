from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers_core import Driver
from trioserve.core.prefix_cache import block_hash, root_hash

PROMPT = list(range(1, 13))  # three blocks of four


def _num_computed(driver: Driver) -> int:
    """Prompt tokens that the next step computes."""
    return sum(count for _, count, _ in driver.step())


def test_a_known_prefix_is_not_computed_again():
    driver = Driver(block_size=4)
    driver.add([*PROMPT, 30], max_tokens=1)
    assert _num_computed(driver) == 13
    hit = driver.add([*PROMPT, 31, 32], max_tokens=1)
    assert _num_computed(driver) == 2
    assert driver.num_cached[hit] == 12


@pytest.mark.parametrize(
    ("length", "num_cached"), [(13, 12), (12, 8), (9, 8), (8, 4), (5, 4), (4, 0), (1, 0)]
)
def test_a_hit_leaves_at_least_one_token_to_compute(length, num_cached):
    driver = Driver(block_size=4)
    driver.add([*PROMPT, 30], max_tokens=1)
    driver.step()
    request = driver.add([*PROMPT, 30][:length], max_tokens=1)
    assert _num_computed(driver) == length - num_cached
    assert driver.num_cached[request] == num_cached


def test_only_a_prefix_hits_not_a_block_with_the_same_tokens_elsewhere():
    driver = Driver(block_size=4)
    driver.add(PROMPT, max_tokens=1)
    driver.step()
    request = driver.add([9, 9, 9, 9, *PROMPT[4:]], max_tokens=1)
    assert _num_computed(driver) == 12
    assert driver.num_cached[request] == 0


def test_a_partial_last_block_is_never_shared():
    driver = Driver(block_size=4)
    first = driver.add(PROMPT[:6], max_tokens=30, ignore_eos=True)
    driver.step()
    second = driver.add(PROMPT[:6], max_tokens=30, ignore_eos=True, seed=1)
    driver.begin()
    tables = [sequence.block_table for sequence in driver.plan.batch.sequences]
    assert tables[0][0] == tables[1][0]
    assert tables[0][1] != tables[1][1]
    driver.end()
    driver.drain()
    assert driver.tokens[first] != driver.tokens[second]


def test_generated_tokens_serve_the_next_turn_of_a_chat():
    driver = Driver(block_size=4)
    first = driver.add(PROMPT, max_tokens=5, ignore_eos=True)
    driver.drain()
    # 12 + 5 tokens are known, but the last one's keys and values were never needed: 16 are computed.
    driver.add([*PROMPT, *driver.tokens[first], 30], max_tokens=1)
    assert _num_computed(driver) == 2


def test_salts_and_no_salt_never_share():
    driver = Driver(block_size=4)
    for cache_salt in (None, "a", "b"):
        driver.add(PROMPT, max_tokens=1, cache_salt=cache_salt)
        assert _num_computed(driver) == 12
    for cache_salt in (None, "a", "b"):
        driver.add(PROMPT, max_tokens=1, cache_salt=cache_salt)
        assert _num_computed(driver) == 4


def test_eviction_takes_the_end_of_a_prompt_before_its_beginning():
    driver = Driver(num_blocks=4, block_size=4, max_model_len=16)
    driver.add([*PROMPT, 30], max_tokens=1)
    driver.step()
    # Four free blocks: the partial fourth, and three full ones. This needs two.
    driver.add([20, 21, 22, 23, 24], max_tokens=1)
    driver.step()
    request = driver.add([*PROMPT, 30], max_tokens=1)
    driver.step()
    assert driver.num_cached[request] == 8


def test_num_cached_tokens_is_that_of_the_first_start():
    driver = Driver(num_blocks=4, block_size=4, max_model_len=16)
    driver.add([1] * 7, max_tokens=8, ignore_eos=True)
    preempted = driver.add([2] * 7, max_tokens=8, ignore_eos=True)
    driver.drain()
    stats = driver.core.take_stats()
    assert stats.num_preemptions > 0
    assert driver.num_cached[preempted] == 0
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (14, 0)


def test_switched_off_nothing_is_found():
    driver = Driver(block_size=4, enable_prefix_caching=False)
    for _ in range(2):
        driver.add(PROMPT, max_tokens=1)
        assert _num_computed(driver) == 12


def test_a_reset_forgets_everything_but_not_while_anything_runs():
    driver = Driver(block_size=4)
    request = driver.add(PROMPT, max_tokens=9, ignore_eos=True)
    driver.step()
    assert not driver.core.reset_prefix_cache()
    driver.abort(request)
    assert driver.core.reset_prefix_cache()
    driver.add(PROMPT, max_tokens=1)
    assert _num_computed(driver) == 12


def test_a_block_hash_depends_on_its_tokens_and_on_all_that_came_before():
    keys = [("m", None), ("m", "None"), ("m", ""), ("n", None), ("m', '", None), ("m",)]
    roots = [root_hash(*parts) for parts in keys]
    hashes = [block_hash(root, tokens) for root in roots for tokens in ([1, 2], [2, 1], [1, 3])]
    assert len(set(hashes)) == len(hashes)
    assert len({block_hash(parent, [5, 6]) for parent in hashes}) == len(hashes)


def test_hashes_are_the_same_in_every_process():
    code = "from trioserve.core.prefix_cache import *; print(block_hash(root_hash('m', 's'), [1, 2]).hex())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == block_hash(root_hash("m", "s"), [1, 2]).hex()
