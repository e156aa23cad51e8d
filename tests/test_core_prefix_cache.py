from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers_kv_cache import Cache, make_request
from trioserve.core.prefix_cache import block_hash, multimodal_content, root_hash
from trioserve.core.request import MultimodalKey
from trioserve.core.stats import CacheEvents
from trioserve.sampling_params import SamplingParams

PROMPT = list(range(1, 13))  # three blocks of four


def test_a_known_prefix_is_not_computed_again():
    cache = Cache()
    assert cache.run([*PROMPT, 30]) == 0
    assert cache.run([*PROMPT, 31, 32]) == 12


@pytest.mark.parametrize(
    ("length", "num_cached"), [(13, 12), (12, 8), (9, 8), (8, 4), (5, 4), (4, 0), (1, 0)]
)
def test_a_hit_leaves_at_least_one_token_to_compute(length, num_cached):
    cache = Cache()
    cache.run([*PROMPT, 30])
    assert cache.run([*PROMPT, 30][:length]) == num_cached


def test_only_a_prefix_hits_not_a_block_with_the_same_tokens_elsewhere():
    cache = Cache()
    cache.run(PROMPT)
    assert cache.run([9, 9, 9, 9, *PROMPT[4:]]) == 0


def test_blocks_of_a_request_that_runs_are_shared_but_for_a_partial_last_one():
    cache = Cache()
    first, second = make_request(PROMPT[:6]), make_request(PROMPT[:6])
    assert cache.admit(first)
    cache.compute(first, 6)
    assert cache.admit(second)
    assert first.block_tables[0][0] == second.block_tables[0][0]
    assert first.block_tables[0][1] != second.block_tables[0][1]


def test_a_chunk_of_a_prompt_is_found_while_the_rest_is_still_computed():
    cache = Cache()
    request = make_request(PROMPT)
    cache.admit(request)
    assert cache.manager.find_cached(make_request(PROMPT)).num_tokens == 0
    cache.compute(request, 9)
    assert cache.manager.find_cached(make_request(PROMPT)).num_tokens == 8


def test_generated_tokens_serve_the_next_turn_of_a_chat():
    cache = Cache()
    request = make_request(PROMPT)
    cache.admit(request)
    cache.compute(request, 12)
    for token in range(40, 45):
        request.output_token_ids.append(token)
        cache.extend(request, request.num_known_tokens)
        cache.compute(request, 1)
    cache.free(request)
    assert cache.run([*PROMPT, *request.output_token_ids, 30]) == 16


def test_a_preempted_request_finds_what_it_had_computed():
    cache = Cache()
    request = make_request(PROMPT)
    cache.admit(request)
    cache.compute(request, 10)
    cache.free(request)
    assert (request.num_computed_tokens, request.block_tables) == (0, [])
    cache.admit(request)
    assert request.num_computed_tokens == 8


@pytest.mark.parametrize("field", ["cache_salt", "lora"])
def test_different_salts_and_adapters_never_share(field):
    cache = Cache()
    values = (None, "a", "b", "", "None")
    assert [cache.run(PROMPT, **{field: value}) for value in values] == [0] * 5
    assert [cache.run(PROMPT, **{field: value}) for value in values] == [8] * 5


def test_a_salt_is_no_adapter():
    cache = Cache()
    assert cache.run(PROMPT, cache_salt="a") == 0
    assert cache.run(PROMPT, lora="a") == 0


def test_pictures_are_told_apart_by_content_size_and_place():
    cache = Cache()
    keys = [
        (),
        (MultimodalKey(position=5, length=2, digest="cat"),),
        (MultimodalKey(position=5, length=2, digest="dog"),),
        (MultimodalKey(position=5, length=3, digest="cat"),),
        (MultimodalKey(position=6, length=2, digest="cat"),),
        (
            MultimodalKey(position=4, length=1, digest="cat"),
            MultimodalKey(position=5, length=2, digest="cat"),
        ),
    ]
    # The first block comes before any picture, and all prompts have it in common.
    assert [cache.run([*PROMPT, 30], multimodal_keys=key) for key in keys] == [0, 4, 4, 4, 4, 4]
    assert [cache.run([*PROMPT, 30], multimodal_keys=key) for key in keys] == [12] * 6


def test_only_blocks_that_a_picture_overlaps_depend_on_it():
    keys = [
        MultimodalKey(position=2, length=4, digest="cat"),  # [2, 6)
        MultimodalKey(position=6, length=1, digest="dog"),  # [6, 7)
        MultimodalKey(position=12, length=9, digest="cow"),  # [12, 21)
    ]
    inside = {start: multimodal_content(keys, start, start + 4) for start in range(0, 28, 4)}
    assert [start for start, content in inside.items() if content] == [0, 4, 12, 16, 20]
    # The cow's first, second and third part, in blocks of equal tokens, are three different things.
    assert len({inside[start] for start in (12, 16, 20)}) == 3
    # The same place within a block is the same content, wherever the block lies.
    shifted = [MultimodalKey(position=k.position + 40, length=k.length, digest=k.digest) for k in keys]
    assert multimodal_content(shifted, 44, 48) == inside[4]


def test_who_wants_to_compute_everything_finds_nothing_but_is_found():
    cache = Cache()
    params = SamplingParams(prompt_logprobs=1)
    assert cache.run(PROMPT, params=params) == 0
    assert cache.run(PROMPT, params=params) == 0
    assert cache.run(PROMPT) == 8


def test_hashing_ahead_changes_no_result():
    cache = Cache()
    cache.run([*PROMPT, 30])
    request = make_request([*PROMPT, 31])
    cache.manager.hash_prompt(request)
    assert len(request.block_hashes) == 3
    cache.admit(request)
    assert request.num_computed_tokens == 12


def test_nothing_is_hashed_ahead_for_those_who_do_not_look():
    cache = Cache()
    request = make_request(PROMPT, params=SamplingParams(skip_reading_prefix_cache=True))
    cache.manager.hash_prompt(request)
    assert request.block_hashes == []


def test_eviction_takes_the_end_of_a_prompt_before_its_beginning():
    cache = Cache(num_blocks=4)
    cache.run([*PROMPT, 30])
    # Four free blocks: the partial fourth, and three full ones. This needs two.
    cache.run([20, 21, 22, 23, 24])
    assert cache.run([*PROMPT, 30]) == 8


def test_a_hit_is_not_evicted_by_the_blocks_taken_along_with_it():
    cache = Cache(num_blocks=4)
    cache.run([*PROMPT, 30])
    request = make_request([*PROMPT[:8], 20, 21, 22, 23, 24])
    cache.admit(request)
    assert request.num_computed_tokens == 8
    cache.compute(request, 5)


def test_free_blocks_that_are_hit_are_not_counted_as_free_twice():
    cache = Cache(num_blocks=4)
    other = make_request([50])
    cache.run(PROMPT)
    cache.admit(other)
    # Two of the three free blocks are hits; two more are needed, and one is left.
    request = make_request([*PROMPT[:8], 20, 21, 22, 23, 24])
    assert not cache.admit(request)
    assert (request.block_tables, cache.num_free) == ([], 3)
    cache.free(other)
    assert cache.admit(request)


def test_switched_off_nothing_is_found():
    cache = Cache(enable_prefix_caching=False)
    request = make_request(PROMPT)
    cache.manager.hash_prompt(request)
    assert request.block_hashes == []
    assert [cache.run(PROMPT) for _ in range(2)] == [0, 0]
    assert cache.manager.take_events() == CacheEvents()


def test_a_reset_forgets_everything_but_not_while_anything_runs():
    cache = Cache()
    request = make_request(PROMPT)
    cache.admit(request)
    cache.compute(request, 12)
    assert not cache.manager.reset_prefix_cache()
    cache.free(request)
    assert cache.manager.reset_prefix_cache()
    assert cache.manager.statistics().num_named == 0
    assert cache.run(PROMPT) == 0


def test_events_tell_what_was_stored_evicted_and_forgotten():
    cache = Cache(num_blocks=4)
    assert cache.manager.take_events() == CacheEvents()
    cache.run([*PROMPT, 30])
    assert cache.manager.take_events() == CacheEvents(num_stored=3)
    cache.run([*PROMPT, 31])  # nothing new
    assert cache.manager.take_events() == CacheEvents()
    cache.run([20, 21, 22, 23, 24])  # the partial block, and one of the prompt's
    assert cache.manager.take_events() == CacheEvents(num_stored=1, num_evicted=1)
    cache.manager.reset_prefix_cache()
    assert cache.manager.take_events() == CacheEvents(num_resets=1)
    assert cache.manager.take_events() == CacheEvents()


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
