"""The KV cache of models whose layers do not all see equally far back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers_kv_cache import Cache, make_request
from trioserve.core.block_pool import BlockPool
from trioserve.core.prefix_cache import PrefixCache
from trioserve.worker.kv_layout import NULL_BLOCK, KVCacheLayout

LAYOUTS = [(None,), (None, 32), (None, 8, 8), (48,), (None, 3, None, 10), (1, 6)]


def _num_held(table: list[int]) -> int:
    return sum(block != NULL_BLOCK for block in table)


def test_windows_hold_no_more_than_they_see():
    cache = Cache(windows=(None, 6))
    request = make_request(range(1, 41))
    cache.admit(request, 40)
    cache.compute(request, 40)
    full, window = request.block_tables
    assert _num_held(full) == 10
    # Position 40 is the next one: it sees [35, 40), which lies in blocks 8 and 9.
    assert window[:8] == [NULL_BLOCK] * 8
    assert _num_held(window) == 2


def test_a_window_lets_go_of_a_block_as_soon_as_nobody_looks_at_it():
    cache = Cache(windows=(6,))
    request = make_request([1] * 8)
    cache.admit(request)
    cache.compute(request, 8)
    held = []
    for _ in range(6):
        held.append(_num_held(request.block_tables[0]))
        request.output_token_ids.append(2)
        cache.extend(request, request.num_known_tokens)
        cache.compute(request, 1)
    # Next are positions 8 to 13. They see from 3, 4, 5, 6, 7, 8 on: block 0 is needed at first, block 1 not
    # at last; block 2 is there from position 8 on, block 3 from 12 on.
    assert held == [2, 2, 2, 2, 2, 2]
    assert request.block_tables[0][:2] == [NULL_BLOCK] * 2


def test_admission_takes_blocks_for_the_whole_prompt_in_full_groups_only():
    cache = Cache(windows=(None, 8, 8))
    request = make_request(range(40))
    cache.admit(request, 10)
    assert [len(table) for table in request.block_tables] == [10, 3, 3]
    cache.compute(request, 10)
    assert cache.extend(request, 20)
    assert [len(table) for table in request.block_tables] == [10, 5, 5]


def test_two_long_prompts_are_not_admitted_on_blocks_for_one():
    cache = Cache(num_blocks=20, windows=(None, 8))
    assert cache.admit(make_request(range(60), request_id=1), 8)
    assert not cache.admit(make_request(range(100, 160), request_id=2), 8)
    assert cache.num_free == 20 - 15 - 2


def test_an_extension_that_does_not_fit_in_every_group_changes_nothing():
    cache = Cache(num_blocks=7, windows=(None, 8, 8))
    request = make_request(range(8))
    cache.admit(request)
    before = [list(table) for table in request.block_tables]
    assert not cache.extend(request, 9)  # one block is left, three are needed
    assert request.block_tables == before
    assert cache.num_free == 1
    assert cache.extend(request, 8)


def test_tables_only_grow_while_a_step_is_in_flight():
    cache = Cache(windows=(None, 4))
    request = make_request(range(30))
    cache.admit(request, 10)
    tables = request.block_tables
    before = [list(table) for table in tables]
    assert cache.extend(request, 25)
    assert request.block_tables is tables
    assert [table[: len(old)] for table, old in zip(tables, before, strict=True)] == before
    cache.compute(request, 10)
    cache.compute(request, 15)


def test_wrong_drafts_are_overwritten_and_never_found():
    cache = Cache(windows=(None, 6))
    request = make_request(range(1, 8))
    cache.admit(request)
    cache.extend(request, 12)
    cache.compute(request, 7, drafts=[90, 91, 92, 93, 94])
    assert cache.manager.find_cached(make_request([*range(1, 8), 90, 91])).num_tokens == 4
    request.output_token_ids.append(8)
    cache.compute(request, 1)
    assert cache.manager.find_cached(make_request([*range(1, 8), 90, 91])).num_tokens == 4
    assert cache.manager.find_cached(make_request([*range(1, 9), 91])).num_tokens == 8


@pytest.mark.parametrize("windows", LAYOUTS)
def test_the_next_turn_of_a_chat_goes_on_where_the_last_one_ended(windows):
    cache = Cache(num_blocks=128, windows=windows)
    turn = list(range(1, 62))
    assert cache.run(turn) == 0
    assert cache.run([*turn, 70, 71]) == 60


def test_blocks_that_a_window_left_behind_are_found_until_they_are_given_out():
    cache = Cache(num_blocks=32, windows=(None, 6))
    prompt = list(range(1, 41))
    request = make_request(prompt)
    cache.admit(request)
    cache.compute(request, 40)  # positions before 35 are released in the window group
    assert cache.run([*prompt[:16], 50]) == 16


def test_eviction_takes_the_end_of_a_prompt_in_all_groups_before_its_beginning_in_any():
    cache = Cache(num_blocks=8, windows=(None, 20))
    prompt = list(range(1, 13))
    cache.run([*prompt, 30])
    # Eight free blocks: in each group the partial fourth, and three full ones. This needs two in each.
    cache.run([40, 41, 42, 43, 44])
    assert cache.run([*prompt, 30]) == 8


def test_a_released_window_makes_room_for_others():
    cache = Cache(num_blocks=4, windows=(4,))
    long = make_request(range(64), request_id=1)
    assert cache.admit(long, 8)
    other = make_request([70] * 8, request_id=2)
    for _ in range(8):
        cache.extend(long, long.num_computed_tokens + 8)
        cache.compute(long, 8)
        assert cache.admit(other, 8)
        cache.free(other)


@pytest.mark.parametrize("windows", LAYOUTS)
@pytest.mark.parametrize("step", [1, 3, 4, 7, 32])
def test_a_sequence_alone_fits_into_what_can_hold_it(windows, step):
    layout = KVCacheLayout(block_size=4, windows=windows)
    cache = Cache(layout.max_blocks(67, step), windows=windows)
    assert cache.manager.can_hold(67, step)
    assert not Cache(layout.max_blocks(67, step) - 1, windows=windows).manager.can_hold(67, step)
    request = make_request(range(50))
    assert cache.admit(request, step)
    while request.num_known_tokens <= 67:
        count = min(step, request.num_known_tokens - request.num_computed_tokens)
        assert cache.extend(request, request.num_computed_tokens + count)
        cache.compute(request, count)
        if request.num_computed_tokens == request.num_known_tokens:
            request.output_token_ids.append(1)
    cache.free(request)
    assert cache.manager.usage == 0


def _brute_force_hit(layout: KVCacheLayout, num_tokens: int, present: set[tuple[int, int]]) -> int:
    """By the definition: every position that a token behind the prefix sees is there."""
    size = layout.block_size
    for end in range((num_tokens - 1) // size * size, 0, -size):
        seen = {
            (group, position // size)
            for group, window in enumerate(layout.windows)
            for token in range(end, end + max(1, window or 1))
            for position in range(0 if window is None else max(0, token - window + 1), end)
        }
        if seen <= present:
            return end
    return 0


@settings(max_examples=300, deadline=None)
@given(
    windows=st.sampled_from(LAYOUTS),
    size=st.integers(1, 5),
    num_tokens=st.integers(1, 40),
    absent=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 39)), max_size=12),
)
def test_the_longest_usable_prefix_is_found(windows, size, num_tokens, absent):
    layout = KVCacheLayout(block_size=size, windows=windows)
    pool = BlockPool(len(windows) * num_tokens + 1)
    prefix_cache = PrefixCache(pool, layout, "model")
    request = make_request(range(num_tokens))
    prefix_cache.hash_prompt(request)
    blocks = {}
    for group in range(len(windows)):
        for index, content in enumerate(request.block_hashes):
            if (group, index) not in absent:
                (blocks[group, index],) = pool.take(1)
                pool.publish(blocks[group, index], (group, content))
    cached = prefix_cache.find(request)
    assert cached.num_tokens == _brute_force_hit(layout, num_tokens, set(blocks))
    for group, found in enumerate(cached.blocks):
        first = layout.first_needed_block(group, cached.num_tokens)
        assert len(found) == cached.num_tokens // size
        assert list(found) == [
            blocks[group, index] if index >= first else NULL_BLOCK for index in range(len(found))
        ]


# Few prompts, so that prefixes are shared often; long ones, so that windows move.
PREFIXES = [[], [5] * 12, [5] * 8 + [7] * 30, list(range(20, 50))]
prompts = st.tuples(
    st.sampled_from(PREFIXES), st.integers(0, 40), st.lists(st.integers(1, 3), min_size=1, max_size=8)
).map(lambda parts: parts[0][: parts[1]] + parts[2])


class KVCacheMachine(RuleBasedStateMachine):
    """What a scheduler does, in any order: the memory of `Cache` notices a block that is used twice."""

    @initialize(
        windows=st.sampled_from(LAYOUTS),
        block_size=st.integers(1, 5),
        num_blocks=st.integers(4, 80),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, windows, block_size, num_blocks, enable_prefix_caching):
        self.cache = Cache(
            num_blocks, windows=windows, block_size=block_size, enable_prefix_caching=enable_prefix_caching
        )
        self.waiting = []
        self.num_requests = 0

    @rule(prompt=prompts, cache_salt=st.sampled_from([None, None, "a"]), num_tokens=st.integers(1, 40))
    def admit_new(self, prompt, cache_salt, num_tokens):
        request = make_request(prompt, request_id=self.num_requests, cache_salt=cache_salt)
        self.num_requests += 1
        self.admit(request, num_tokens)

    @precondition(lambda self: self.waiting)
    @rule(num_tokens=st.integers(1, 40))
    def admit_again(self, num_tokens):
        self.admit(self.waiting.pop(0), num_tokens)

    def admit(self, request, num_tokens):
        num_free = self.cache.num_free
        self.cache.manager.hash_prompt(request)
        if not self.cache.admit(request, num_tokens):
            assert self.cache.num_free == num_free
            assert request.block_tables == []

    @precondition(lambda self: self.cache.holders)
    @rule(data=st.data(), count=st.integers(1, 40), drafts=st.lists(st.just(99), max_size=5))
    def step(self, data, count, drafts):
        request = data.draw(st.sampled_from(self.cache.holders))
        count = min(count, request.num_known_tokens - request.num_computed_tokens)
        end = request.num_computed_tokens + count
        if not self.cache.extend(request, end):
            self.preempt(request)
            return
        samples = end == request.num_known_tokens
        if not (samples and self.cache.extend(request, end + len(drafts))):
            drafts = []
        self.cache.compute(request, count, drafts)
        if samples:
            request.output_token_ids.append(data.draw(st.integers(1, 3)))

    @precondition(lambda self: self.cache.holders)
    @rule(data=st.data(), count=st.integers(1, 40))
    def extend_ahead(self, data, count):
        request = data.draw(st.sampled_from(self.cache.holders))
        num_free, before = self.cache.num_free, [list(table) for table in request.block_tables]
        if not self.cache.extend(request, request.num_computed_tokens + count):
            assert self.cache.num_free == num_free
            assert request.block_tables == before

    @precondition(lambda self: self.cache.holders)
    @rule(data=st.data())
    def end(self, data):
        self.cache.free(data.draw(st.sampled_from(self.cache.holders)))

    def preempt(self, request):
        self.cache.free(request)
        self.waiting.append(request)

    @rule()
    def reset(self):
        assert self.cache.manager.reset_prefix_cache() == (not self.cache.holders)
        self.cache.manager.check(self.cache.holders)

    @invariant()
    def events_add_up(self):
        if hasattr(self, "cache"):
            named = self.cache.manager.statistics().num_named
            events = self.cache.manager.take_events()
            before = 0 if events.num_resets else getattr(self, "named", 0)
            assert events.num_resets or named == before + events.num_stored - events.num_evicted
            self.named = named

    def teardown(self):
        if hasattr(self, "cache"):
            for request in list(self.cache.holders):
                self.cache.free(request)
            statistics = self.cache.manager.statistics()
            assert statistics.num_free == statistics.num_blocks
            assert self.cache.manager.usage == 0


KVCacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestKVCacheMachine = KVCacheMachine.TestCase
