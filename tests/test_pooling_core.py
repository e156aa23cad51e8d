"""The core that pools: which texts are in which step, and what is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hash_pooling import HashPoolingRunner
from helpers_pooling import EMBEDDER, hash_of
from trioserve.args import EngineArgs
from trioserve.core.pooling import PoolingCore
from trioserve.core.pooling_request import CorePoolingRequest
from trioserve.outputs import FinishReason
from trioserve.pooling_params import PoolingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.core.pooling import PoolingPlan

EMBED = PoolingParams(task="embed")
MAX_MODEL_LEN = 40
LONG = 13
"""A token of texts that fail."""


class Driver:
    """A core, its clock, and what it has told of each text."""

    def __init__(self, **config: Any) -> None:
        config = {"max_num_batched_tokens": 10, "max_num_seqs": 4, **config}
        self.now = 0.0
        self.runner = HashPoolingRunner(EMBEDDER, fails_on=LONG)
        self.core = PoolingCore(
            self.runner,
            EngineArgs(**config).create_engine_config().scheduler,
            max_model_len=MAX_MODEL_LEN,
            clock=lambda: self.now,
        )
        self.tokens: dict[int, list[int]] = {}
        self.results: dict[int, np.ndarray | FinishReason] = {}
        self.freed: list[int] = []
        self.failures: list[str] = []
        self.plan: PoolingPlan | None = None

    def add(self, tokens: Sequence[int], **routing: Any) -> int:
        number = len(self.tokens) + 1
        self.core.add(
            CorePoolingRequest(request_id=number, prompt_token_ids=list(tokens), params=EMBED, **routing)
        )
        self.tokens[number] = list(tokens)
        return number

    def add_lengths(self, *lengths: int, **routing: Any) -> list[int]:
        return [self.add([1] * length, **routing) for length in lengths]

    def begin(self) -> list[int] | None:
        """The texts of the next step."""
        self.plan = self.core.schedule()
        self._take()
        return None if self.plan is None else [request.request_id for request in self.plan.requests]

    def end(self) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        self.core.finish(plan, self.core.execute(plan))
        self._take()

    def step(self) -> list[int] | None:
        began = self.begin()
        if began is not None:
            self.end()
        return began

    def _take(self) -> None:
        result = self.core.take_result()
        self.freed += result.freed
        self.failures += result.failures
        for number, reason, pooled in zip(
            result.request_ids, result.finish_reasons, result.pooled, strict=True
        ):
            assert number not in self.results, "told twice"
            has_data = reason is FinishReason.STOP and pooled is not None and pooled.data is not None
            self.results[number] = pooled.data if has_data else reason  # type: ignore[union-attr, assignment]

    def expected(self, number: int) -> np.ndarray:
        return hash_of(self.tokens[number], [], EMBED, EMBEDDER)


def test_a_step_has_whole_texts_in_their_order_as_far_as_they_fit() -> None:
    driver = Driver()
    driver.add_lengths(4, 6, 7, 2, 1, 1, 1)
    assert driver.step() == [1, 2]
    assert driver.step() == [3, 4, 5]
    assert driver.step() == [6, 7]
    assert driver.step() is None
    assert all(np.array_equal(driver.results[i], driver.expected(i)) for i in range(1, 8))


def test_shorter_texts_do_not_overtake() -> None:
    driver = Driver()
    driver.add_lengths(6, 5, 1)
    assert [driver.step(), driver.step()] == [[1], [2, 3]]


def test_a_text_that_is_longer_than_a_step_has_one_of_its_own() -> None:
    driver = Driver()
    driver.add_lengths(1, 40, 1, 1)
    assert [driver.step(), driver.step(), driver.step()] == [[1], [2], [3, 4]]


def test_a_step_has_no_more_texts_than_there_are_seats() -> None:
    driver = Driver()
    driver.add_lengths(*[1] * 6)
    assert [driver.step(), driver.step()] == [[1, 2, 3, 4], [5, 6]]


def test_the_policy_decides_who_is_first() -> None:
    driver = Driver(scheduling_policy="priority")
    driver.add_lengths(6, priority=1)
    driver.add_lengths(6, priority=0)
    assert [driver.step(), driver.step()] == [[2], [1]]


def test_a_text_whose_deadline_has_passed_is_not_computed() -> None:
    driver = Driver(scheduling_policy="deadline")
    driver.add_lengths(6, deadline=5.0)
    driver.add_lengths(6, deadline=1.0)
    driver.add_lengths(6)
    driver.now = 2.0
    assert driver.step() == [1]
    assert driver.results[2] is FinishReason.DEADLINE
    assert driver.step() == [3]


def test_one_text_that_fails_harms_no_other() -> None:
    driver = Driver()
    driver.add([1, 2])
    driver.add([LONG, 2])
    driver.add([3])
    assert driver.step() == [1, 2, 3]
    assert driver.results[2] is FinishReason.ERROR
    assert driver.failures == ["request 2: it was told to fail"]
    assert np.array_equal(driver.results[3], driver.expected(3))


def test_an_aborted_text_is_free_at_once_or_with_its_step() -> None:
    driver = Driver()
    driver.add_lengths(6, 4, 3)
    assert driver.begin() == [1, 2]
    driver.core.abort([1, 3, 99])
    assert list(driver.core.take_freed().freed) == [3, 99]
    assert driver.core.take_stats().num_running == 1
    driver.end()
    assert driver.freed == [1]
    assert driver.results.keys() == {2}
    assert not driver.core.has_work


def test_held_the_core_begins_with_nothing() -> None:
    driver = Driver()
    driver.add_lengths(3)
    driver.core.hold(new_only=True)
    assert driver.step() is None
    assert driver.core.take_stats().is_full
    driver.core.release()
    assert driver.step() == [1]


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], EMBED, "1 to 40 tokens"),
        ([1] * 41, EMBED, "got 41"),
        ([1], PoolingParams(), "task"),
    ],
)
def test_what_the_frontend_must_not_send(tokens: list[int], params: PoolingParams, message: str) -> None:
    driver = Driver()
    with pytest.raises(ValueError, match=message):
        driver.core.add(CorePoolingRequest(request_id=1, prompt_token_ids=tokens, params=params))
    assert not driver.core.has_work


class History(RuleBasedStateMachine):
    """Any history of arrivals, steps and aborts."""

    @initialize(
        budget=st.integers(1, 30), seats=st.integers(1, 5), policy=st.sampled_from(["fcfs", "priority"])
    )
    def start(self, budget: int, seats: int, policy: str) -> None:
        self.driver = Driver(
            max_num_batched_tokens=budget, max_num_seqs=min(seats, budget), scheduling_policy=policy
        )
        self.budget = budget
        self.aborted: list[int] = []

    @rule(tokens=st.lists(st.integers(1, 13), min_size=1, max_size=MAX_MODEL_LEN), priority=st.integers(0, 2))
    def arrive(self, tokens: list[int], priority: int) -> None:
        self.driver.add(tokens, priority=priority)

    @rule(number=st.integers(1, 40))
    def abort(self, number: int) -> None:
        if number not in self.aborted:
            self.aborted.append(number)
            self.driver.core.abort([number])

    @precondition(lambda self: self.driver.plan is None)
    @rule()
    def begin(self) -> None:
        began = self.driver.begin()
        if began is not None:
            assert len(began) == 1 or sum(len(self.driver.tokens[i]) for i in began) <= self.budget

    @precondition(lambda self: self.driver.plan is not None)
    @rule()
    def end(self) -> None:
        self.driver.end()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "driver"):
            self.driver.core.check()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        if driver.plan is not None:
            driver.end()
        while driver.step() is not None:
            pass
        assert sorted(driver.freed) == sorted(self.aborted)
        assert not driver.core.has_work
        for number, tokens in driver.tokens.items():
            if number in driver.results and LONG in tokens:
                assert driver.results[number] is FinishReason.ERROR
            elif number in driver.results:
                assert np.array_equal(driver.results[number], driver.expected(number))
            else:
                assert number in self.aborted


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
