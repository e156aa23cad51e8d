"""Any history of arrivals, steps, aborts and resets: outputs are what the model gives without an engine."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers_core import VOCAB_SIZE, Driver

MAX_MODEL_LEN = 24

# Few prompts, so that prefixes are shared often; long ones, so that they fill several blocks.
PREFIXES = [[], [5] * 12, [5] * 8 + [7] * 8, list(range(20, 36))]

drivers = st.builds(
    lambda block_size, spare_blocks, **config: Driver(
        num_blocks=-(-MAX_MODEL_LEN // block_size) + spare_blocks,
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        **config,
    ),
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 12),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 40),
    enable_prefix_caching=st.sampled_from([True, True, True, False]),
)
prompts = st.tuples(
    st.sampled_from(PREFIXES), st.lists(st.integers(1, 4), min_size=1, max_size=MAX_MODEL_LEN - 17)
).map(lambda parts: parts[0] + parts[1])
params = st.integers(1, MAX_MODEL_LEN).flatmap(
    lambda max_tokens: st.fixed_dictionaries(
        {
            "max_tokens": st.just(max_tokens),
            "min_tokens": st.integers(0, max_tokens),
            "ignore_eos": st.booleans(),
            "stop_token_ids": st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4),
        }
    )
)


class EngineMachine(RuleBasedStateMachine):
    """Aborts and arrivals come at any time, also while a step is in flight."""

    @initialize(driver=drivers)
    def start(self, driver: Driver):
        self.driver = driver

    @rule(
        prompt=prompts,
        params=params,
        seed=st.integers(0, 1),
        streams=st.booleans(),
        cache_salt=st.sampled_from([None, None, "a", "b"]),
    )
    def add(self, prompt, params, seed, streams, cache_salt):
        self.driver.add(prompt, seed=seed, streams=streams, cache_salt=cache_salt, **params)

    @rule(data=st.data())
    def abort(self, data):
        """Requests of any age, so also ended ones, and one that never was."""
        last = len(self.driver.requests)
        self.driver.abort(*data.draw(st.lists(st.integers(max(0, last - 6), last), max_size=3)))

    @precondition(lambda self: self.driver.plan is None)
    @rule()
    def begin_step(self):
        self.driver.begin()

    @precondition(lambda self: self.driver.plan is not None)
    @rule()
    def end_step(self):
        self.driver.end()

    @precondition(lambda self: self.driver.plan is None)
    @rule(count=st.integers(1, 20))
    def steps(self, count):
        for _ in range(count):
            self.driver.step()

    @rule()
    def reset_prefix_cache(self):
        assert self.driver.core.reset_prefix_cache() == (self.driver.num_held_blocks == 0)

    @invariant()
    def nothing_leaks(self):
        if hasattr(self, "driver"):
            self.driver.scheduler.check()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.end()
            self.driver.drain()


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_thousands_of_steps_on_a_cache_that_is_too_small(block_size: int):
    """One engine, kept busy with more than its blocks can hold; hits and preemptions happen all the time."""
    rng = random.Random(block_size)
    driver = Driver(
        num_blocks=36 // block_size,
        block_size=block_size,
        max_num_seqs=5,
        max_num_batched_tokens=16,
        max_model_len=MAX_MODEL_LEN,
    )
    for _ in range(2000):
        if len(driver.live) < 8 and rng.random() < 0.5:
            prompt = rng.choice(PREFIXES) + [rng.randrange(1, 5) for _ in range(rng.randrange(1, 8))]
            driver.add(prompt, seed=rng.randrange(2), max_tokens=rng.randrange(1, 16))
        driver.begin()
        if driver.live and rng.random() < 0.05:
            driver.abort(rng.choice(sorted(driver.live)))
        driver.end()
        driver.scheduler.check()
    driver.drain()
    stats = driver.core.take_stats()
    assert len(driver.finished) > 200
    assert stats.num_preemptions > 50
    assert stats.prefix_cache_hits > 500
