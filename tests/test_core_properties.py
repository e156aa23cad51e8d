"""Any history of arrivals, steps, aborts and resets: outputs are what the model gives without an engine."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hash_model import VOCAB_SIZE, GrammarForm
from helpers_core import Driver
from trioserve.sampling_params import RepetitionDetection
from trioserve.worker.kv_layout import KVCacheLayout

MAX_MODEL_LEN = 24

# Few prompts, so that prefixes are shared often; long ones, so that they fill several blocks.
PREFIXES = [[], [5] * 12, [5] * 8 + [7] * 8, list(range(20, 36))]

LAYOUTS = [(None,), (None,), (None,), (None, 5), (8, None, 8), (6,), (3, 7)]


def make_driver(block_size: int, windows: tuple[int | None, ...], spare_blocks: int, **config: Any) -> Driver:
    """With enough blocks for one sequence, and a few more."""
    layout = KVCacheLayout(block_size=block_size, windows=windows)
    least = layout.max_blocks(MAX_MODEL_LEN, config["max_num_batched_tokens"])
    return Driver(
        num_blocks=least + spare_blocks,
        block_size=block_size,
        windows=windows,
        max_model_len=MAX_MODEL_LEN,
        **config,
    )


drivers = st.builds(
    make_driver,
    block_size=st.integers(1, 5),
    windows=st.sampled_from(LAYOUTS),
    spare_blocks=st.integers(0, 16),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 40),
    policy=st.sampled_from(["fcfs", "priority", "deadline"]),
    long_prefill_token_threshold=st.sampled_from([1, 4, 100]),
    prefill_beside_decodes=st.sampled_from([1, 3, 100]),
    max_long_partial_prefills=st.integers(1, 2),
    enable_prefix_caching=st.sampled_from([True, True, True, False]),
    drafts=st.booleans(),
    max_loras=st.integers(1, 3),
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
            "logprobs": st.sampled_from([None, None, 0]),
            "repetition_detection": st.sampled_from(
                [None, None, RepetitionDetection(max_pattern_size=2, min_count=2)]
            ),
        }
    )
)
grammars = st.builds(
    GrammarForm,
    # Forced ones among them, also EOS, and the same one again and again.
    st.lists(st.sampled_from([None, None, 0, 3, 3, 4]), min_size=1, max_size=12).map(tuple),
    may_end=st.frozensets(st.integers(1, 10), max_size=3),
    fails_after=st.sampled_from([None, None, None, 1, 4]),
)


class EngineMachine(RuleBasedStateMachine):
    """Aborts, arrivals, plans and holds come at any time, also while a step is in flight."""

    @initialize(driver=drivers)
    def start(self, driver: Driver):
        self.driver = driver
        self.holds_all = False

    @rule(
        prompt=prompts,
        params=params,
        seed=st.integers(0, 1),
        streams=st.booleans(),
        cache_salt=st.sampled_from([None, None, "a", "b"]),
        priority=st.integers(-1, 2),
        time_left=st.sampled_from([math.inf, 1.0, 20.0]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        grammar=st.none() | grammars,
        lora=st.sampled_from([None, None, "a", "b", "c", "d"]),
    )
    def add(
        self, prompt, params, seed, streams, cache_salt, priority, time_left, prompt_logprobs, grammar, lora
    ):
        self.driver.add(
            prompt,
            seed=seed,
            streams=streams,
            cache_salt=cache_salt,
            priority=priority,
            deadline=self.driver.now + time_left,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            lora=lora,
            **params,
        )

    @rule(data=st.data())
    def abort(self, data):
        """Requests of any age, so also ended ones, and one that never was."""
        last = len(self.driver.requests)
        self.driver.abort(*data.draw(st.lists(st.integers(max(0, last - 6), last), max_size=3)))

    @rule(seconds=st.floats(0.1, 5))
    def pass_time(self, seconds):
        self.driver.now += seconds

    @precondition(lambda self: self.driver.plan is None)
    @rule()
    def begin_step(self):
        self.driver.begin()
        if self.driver.plan is None and not self.holds_all:
            assert self.driver.core.num_begun == 0, "a hold of new requests lets the others run to their end"

    @precondition(lambda self: self.driver.plan is not None)
    @rule()
    def plan_ahead(self):
        self.driver.core.plan_ahead()

    @precondition(lambda self: self.driver.plan is not None)
    @rule()
    def end_step(self):
        self.driver.end()

    @precondition(lambda self: self.driver.plan is None)
    @rule(count=st.integers(1, 20), ahead=st.booleans())
    def steps(self, count, ahead):
        for _ in range(count):
            self.driver.step(ahead=ahead)

    @rule(new_only=st.booleans())
    def hold(self, new_only):
        self.driver.core.hold(new_only=new_only)
        self.holds_all = not new_only

    @rule()
    def release(self):
        self.driver.core.release()
        self.holds_all = False

    @rule()
    def reset_prefix_cache(self):
        assert self.driver.core.reset_prefix_cache() == (self.driver.num_held_blocks == 0)

    @precondition(lambda self: self.driver.plan is None)
    @rule()
    def reset_prefix_cache_with_preemption(self):
        assert self.driver.core.reset_prefix_cache(preempt_running=True)
        assert self.driver.num_held_blocks == 0

    @invariant()
    def nothing_leaks(self):
        if hasattr(self, "driver"):
            self.driver.scheduler.check()
            assert self.driver.unfreed <= self.driver.computed_now, "only a step in flight holds aborted ones"

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.end()
            self.driver.core.release()
            self.driver.drain()


EngineMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline"])
@pytest.mark.parametrize(("windows", "drafts"), [((None,), False), ((None, 5), True), ((6,), True)])
def test_thousands_of_steps_on_a_cache_that_is_too_small(policy: str, windows: Any, drafts: bool):
    """One engine, kept busy with more than its blocks can hold; hits and preemptions happen all the time."""
    rng = random.Random(f"{policy} {windows}")
    driver = make_driver(
        3,
        windows,
        5,
        max_num_seqs=5,
        max_num_batched_tokens=16,
        policy=policy,
        long_prefill_token_threshold=8,
        prefill_beside_decodes=4,
        drafts=drafts,
        max_loras=2,
    )
    for _ in range(2000):
        driver.now += 1.0
        if len(driver.live) < 8 and rng.random() < 0.5:
            prompt = rng.choice(PREFIXES) + [rng.randrange(1, 5) for _ in range(rng.randrange(1, 8))]
            driver.add(
                prompt,
                seed=rng.randrange(2),
                max_tokens=rng.randrange(1, 16),
                priority=rng.randrange(3),
                deadline=driver.now + rng.randrange(10, 60),
                lora=rng.choice([None, None, "a", "b", "c"]),
            )
        driver.begin()
        if driver.plan is not None and rng.random() < 0.7:
            driver.core.plan_ahead()
        if driver.live and rng.random() < 0.05:
            driver.abort(rng.choice(sorted(driver.live)))
        driver.end()
        driver.scheduler.check()
    driver.drain()
    stats = driver.core.take_stats()
    assert len(driver.finished) > 200
    assert stats.num_preemptions > 50 or windows == (6,)
    assert stats.prefix_cache_hits > 500
    assert (driver.runner.num_kept_drafts > 100) == drafts
