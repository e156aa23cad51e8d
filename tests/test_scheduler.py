from __future__ import annotations

import pytest

from helpers_core import EOS, Driver, next_token
from trioserve.core.request import CoreRequest
from trioserve.outputs import FinishReason
from trioserve.sampling_params import SamplingParams


def prompt(length: int, first: int = 1) -> list[int]:
    """Prompts with different `first` share nothing."""
    return [first] + [2] * (length - 1)


def test_a_long_prompt_is_computed_in_chunks_and_sampled_once():
    driver = Driver(max_num_batched_tokens=4)
    request = driver.add(prompt(10), max_tokens=2, ignore_eos=True)
    assert driver.step() == [(request, 4, False)]
    assert driver.step() == [(request, 4, False)]
    assert driver.step() == [(request, 2, True)]
    assert driver.step() == [(request, 1, True)]
    assert driver.step() == []
    assert len(driver.tokens[request]) == 2


def test_the_budget_goes_to_running_requests_first_and_then_to_waiting_ones_in_order():
    driver = Driver(max_num_batched_tokens=10)
    a = driver.add(prompt(3, 1), max_tokens=9, ignore_eos=True)
    b = driver.add(prompt(4, 2), max_tokens=9, ignore_eos=True)
    assert driver.step() == [(a, 3, True), (b, 4, True)]
    c = driver.add(prompt(5, 3), max_tokens=9, ignore_eos=True)
    d = driver.add(prompt(6, 4), max_tokens=9, ignore_eos=True)
    e = driver.add(prompt(2, 5), max_tokens=9, ignore_eos=True)
    assert driver.step() == [(a, 1, True), (b, 1, True), (c, 5, True), (d, 3, False)]
    assert driver.step() == [(a, 1, True), (b, 1, True), (c, 1, True), (d, 3, True), (e, 2, True)]


def test_no_more_requests_run_than_the_budget_serves_in_one_step():
    driver = Driver(max_num_batched_tokens=2)
    a, b, c = (driver.add([first], max_tokens=2, ignore_eos=True) for first in (1, 2, 3))
    assert driver.step() == [(a, 1, True), (b, 1, True)]
    assert driver.step() == [(a, 1, True), (b, 1, True)]
    assert driver.step() == [(c, 1, True)]


def test_no_more_than_max_num_seqs_run():
    driver = Driver(max_num_seqs=2)
    a, b, c = (driver.add(prompt(3, first), max_tokens=2, ignore_eos=True) for first in (1, 2, 3))
    assert driver.step() == [(a, 3, True), (b, 3, True)]
    assert (driver.core.take_stats().num_running, driver.core.take_stats().num_waiting) == (2, 1)
    assert driver.step() == [(a, 1, True), (b, 1, True)]
    assert driver.step() == [(c, 3, True)]


def test_a_waiting_request_never_preempts_nor_is_overtaken_by_a_smaller_one():
    driver = Driver(num_blocks=4, block_size=4, max_model_len=16)
    a = driver.add(prompt(9, 1), max_tokens=3, ignore_eos=True)  # 3 of 4 blocks
    large = driver.add(prompt(6, 2), max_tokens=1, ignore_eos=True)  # would need 2
    small = driver.add(prompt(2, 3), max_tokens=1, ignore_eos=True)  # would fit
    assert driver.step() == [(a, 9, True)]
    assert driver.step() == [(a, 1, True)]
    assert driver.step() == [(a, 1, True)]
    assert driver.step() == [(large, 6, True), (small, 2, True)]
    assert driver.core.take_stats().num_preemptions == 0


def test_when_blocks_run_out_the_last_admitted_gives_way_and_comes_back_first():
    # Without the prefix cache, so that the lengths below are those of a full recompute.
    driver = Driver(num_blocks=4, block_size=4, max_model_len=16, max_num_seqs=2, enable_prefix_caching=False)
    a = driver.add(prompt(7, 1), max_tokens=5, ignore_eos=True)  # 2 blocks, 3 after two tokens
    b = driver.add(prompt(7, 2), max_tokens=5, ignore_eos=True)
    c = driver.add(prompt(2, 3), max_tokens=1, ignore_eos=True)
    assert driver.step() == [(a, 7, True), (b, 7, True)]
    assert driver.step() == [(a, 1, True), (b, 1, True)]
    assert driver.step() == [(a, 1, True)]
    # a needed a third block: b had to go, and nobody came in its place.
    assert driver.core.take_stats().num_preemptions == 1
    # b, with its two tokens so far, needs three blocks, and c does not overtake it.
    assert driver.step() == [(a, 1, True)]
    assert driver.step() == [(a, 1, True)]
    assert driver.step() == [(b, 9, True), (c, 2, True)]
    driver.drain()
    assert len(driver.tokens[b]) == 5  # the driver has compared them with the model's


def test_a_request_that_can_only_get_blocks_from_itself_gives_way():
    driver = Driver(num_blocks=4, block_size=4, max_model_len=16, enable_prefix_caching=False)
    a = driver.add(prompt(6, 1), max_tokens=9, ignore_eos=True)  # 2 blocks until it has 8 tokens
    b = driver.add(prompt(7, 2), max_tokens=9, ignore_eos=True)  # 2 blocks, the third one step earlier
    driver.step()
    driver.step()
    assert driver.step() == [(a, 1, True)]
    assert driver.core.take_stats().num_preemptions == 1
    driver.drain()
    assert set(driver.finished) == {a, b}


def test_a_preempted_request_finds_what_it_has_computed():
    driver = Driver(num_blocks=6, block_size=4, max_model_len=16)
    a = driver.add(prompt(11, 1), max_tokens=2, ignore_eos=True)
    b = driver.add(prompt(10, 2), max_tokens=6, ignore_eos=True)  # 3 blocks each
    driver.step()
    assert driver.step() == [(a, 1, True), (b, 1, True)]
    c = driver.add(prompt(12, 3), max_tokens=3, ignore_eos=True)
    driver.step()
    assert driver.step() == [(b, 1, True)], "c holds the three other blocks, b needs a fourth: c gives way"
    assert driver.core.take_stats().num_preemptions == 1
    driver.drain()
    assert set(driver.finished) == {a, b, c}
    computed_again = [count for batch in driver.runner.batches for id_, count, _ in batch if id_ == c][1]
    assert computed_again < 12


def _waiting(driver: Driver) -> int:
    driver.add(prompt(4, 1), max_tokens=9, ignore_eos=True)
    driver.step()
    return driver.add(prompt(60, 2), max_tokens=3)


def _prefilling(driver: Driver) -> int:
    request = driver.add(prompt(60, 1), max_tokens=3)
    assert driver.step() == [(request, 16, False)]
    return request


def _decoding(driver: Driver) -> int:
    request = driver.add(prompt(6, 1), max_tokens=9, ignore_eos=True)
    driver.step()
    driver.step()
    return request


def _preempted(driver: Driver) -> int:
    driver.add(prompt(15, 1), max_tokens=40, ignore_eos=True)
    request = driver.add(prompt(16, 2), max_tokens=40, ignore_eos=True)
    while driver.core.take_stats().num_preemptions == 0:
        driver.step()
    return request


STATES = [_waiting, _prefilling, _decoding, _preempted]


@pytest.mark.parametrize("reach", STATES)
def test_an_abort_between_steps_takes_effect_at_once(reach):
    driver = Driver(num_blocks=16, block_size=4, max_num_batched_tokens=16)
    request = reach(driver)
    driver.abort(request)
    driver.scheduler.check()
    driver.abort(*driver.live)
    assert driver.num_held_blocks == 0
    assert not driver.core.has_work
    assert driver.step() == []
    stats = driver.core.take_stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


@pytest.mark.parametrize("reach", STATES)
def test_an_abort_during_a_step_keeps_the_blocks_until_the_step_is_back(reach):
    driver = Driver(num_blocks=16, block_size=4, max_num_batched_tokens=16)
    request = reach(driver)
    driver.begin()
    held = driver.num_held_blocks
    computed = {sequence.request_id for sequence in driver.plan.batch.sequences}
    num_reported = len(driver.tokens[request])
    driver.abort(request)
    assert driver.num_held_blocks == held
    assert driver.core.has_work
    driver.end()
    driver.scheduler.check()
    assert len(driver.tokens[request]) == num_reported
    assert (driver.num_held_blocks < held) == (request in computed)
    driver.drain()


def test_aborting_unknown_ended_or_aborted_requests_does_nothing():
    driver = Driver()
    request = driver.add(prompt(3), max_tokens=1)
    driver.step()
    driver.abort(request, 77)
    other = driver.add(prompt(3), max_tokens=3, ignore_eos=True)
    driver.begin()
    driver.abort(other)
    driver.abort(other)
    driver.end()
    driver.abort(other)
    assert not driver.core.has_work


def test_what_an_aborted_request_has_computed_stays_in_the_prefix_cache():
    driver = Driver(block_size=4)
    request = driver.add(prompt(9), max_tokens=3)
    driver.begin()
    driver.abort(request)
    driver.end()
    again = driver.add(prompt(9), max_tokens=1)
    assert driver.step() == [(again, 1, True)]


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (0, 1, "1 to 15 tokens"),
        (16, 1, "1 to 15 tokens"),
        (3, None, "max_tokens must be set"),
    ],
)
def test_a_request_that_no_client_should_send_is_refused(length, max_tokens, message):
    driver = Driver(max_model_len=16)
    with pytest.raises(ValueError, match=message):
        driver.add(prompt(length)[:length], max_tokens=max_tokens)
    assert not driver.core.has_work


def test_a_request_id_in_use_is_refused_and_the_request_that_has_it_goes_on():
    driver = Driver()
    request = driver.add(prompt(3), max_tokens=2)
    with pytest.raises(ValueError, match="request id 0 is in use"):
        driver.core.add(
            CoreRequest(request_id=0, prompt_token_ids=[1], params=SamplingParams(max_tokens=1), seed=0)
        )
    driver.drain()
    assert request in driver.finished


def test_only_the_step_in_flight_can_come_back_and_only_once():
    driver = Driver()
    driver.add(prompt(3), max_tokens=5, ignore_eos=True)
    plan = driver.core.schedule()
    outputs = driver.core.execute(plan)
    driver.core.finish(plan, outputs)
    with pytest.raises(AssertionError, match="only once"):
        driver.core.finish(plan, outputs)


def test_a_cache_below_one_whole_sequence_is_refused():
    with pytest.raises(AssertionError, match="at least one whole sequence"):
        Driver(num_blocks=4, block_size=4, max_model_len=17)


def test_stats_count_since_they_were_last_taken():
    driver = Driver(block_size=4)
    driver.add(prompt(9), max_tokens=1)
    driver.add(prompt(6, 3), max_tokens=1)
    driver.step()
    driver.add(prompt(9), max_tokens=1)
    driver.step()
    stats = driver.core.take_stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.num_prompt_tokens) == (24, 8, 16)
    assert stats.num_generation_tokens == 3
    stats = driver.core.take_stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.num_prompt_tokens) == (0, 0, 0)


def test_an_abort_without_a_step_changes_the_stats():
    driver = Driver(num_blocks=16, block_size=4)
    assert not driver.core.stats_changed
    request = driver.add(prompt(8), max_tokens=9, ignore_eos=True)
    assert driver.core.stats_changed
    assert driver.core.take_stats().num_waiting == 1
    driver.step()
    stats = driver.core.take_stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (1, 0, 2 / 16)
    assert not driver.core.stats_changed
    driver.abort(request)
    assert driver.core.stats_changed
    assert driver.core.take_stats().num_running == 0


def test_a_request_that_is_aborted_during_its_step_runs_no_more_and_holds_its_blocks() -> None:
    driver = Driver(block_size=4)
    aborted = driver.add(prompt(9), max_tokens=5)
    driver.add(prompt(6, 3), max_tokens=5)
    driver.begin()
    driver.core.take_stats()
    driver.abort(aborted)
    assert driver.core.stats_changed
    during = driver.core.take_stats()
    assert (during.num_running, during.num_waiting) == (1, 0)
    driver.end()
    after = driver.core.take_stats()
    assert after.num_running == 1
    assert after.kv_cache_usage < during.kv_cache_usage


# Long prompts


def test_a_long_prompt_gets_a_limited_part_of_a_step_that_others_share():
    driver = Driver(max_num_batched_tokens=40, long_prefill_token_threshold=8)
    a = driver.add(prompt(3, 1), max_tokens=9, ignore_eos=True)
    driver.step()
    long = driver.add(prompt(30, 2), max_tokens=2, ignore_eos=True)
    assert driver.step() == [(a, 1, True), (long, 8, False)]
    assert driver.step() == [(a, 1, True), (long, 8, False)]
    short = driver.add(prompt(7, 3), max_tokens=1, ignore_eos=True)
    assert driver.step() == [(a, 1, True), (long, 8, False), (short, 7, True)]
    assert driver.step() == [(a, 1, True), (long, 6, True)]


def test_a_long_prompt_alone_gets_the_whole_step():
    driver = Driver(max_num_batched_tokens=40, long_prefill_token_threshold=8)
    long = driver.add(prompt(30, 2), max_tokens=1, ignore_eos=True)
    assert driver.step() == [(long, 30, True)]


def test_short_prompts_pass_a_long_one_that_waits_for_another_long_one_but_none_passes_it_else():
    driver = Driver(max_num_batched_tokens=40, long_prefill_token_threshold=8, max_num_seqs=4)
    a = driver.add(prompt(20, 1), max_tokens=3, ignore_eos=True)
    b = driver.add(prompt(20, 2), max_tokens=3, ignore_eos=True)
    c = driver.add(prompt(5, 3), max_tokens=6, ignore_eos=True)
    assert driver.step() == [(a, 8, False), (c, 5, True)]
    assert driver.step() == [(a, 8, False), (c, 1, True)]
    assert driver.step() == [(a, 4, True), (c, 1, True), (b, 8, False)], "a lacked 4: it was short"
    assert driver.step() == [(a, 1, True), (b, 8, False), (c, 1, True)]


# Prompts beside decodes


def decoding(driver: Driver, count: int) -> list[tuple[int, int, bool]]:
    """Requests that decode from now on, as `Driver.step` shows them."""
    decodes = [driver.add(prompt(2, 90 + place), max_tokens=40, ignore_eos=True) for place in range(count)]
    driver.step()
    return [(request, 1, True) for request in decodes]


def test_beside_decodes_prompts_together_get_a_small_part_of_the_step():
    driver = Driver(max_num_batched_tokens=40, prefill_beside_decodes=8)
    decodes = decoding(driver, 2)
    a, b = (driver.add(prompt(6, first), max_tokens=1, ignore_eos=True) for first in (1, 2))
    assert driver.step() == [*decodes, (a, 6, True), (b, 2, False)]
    assert driver.step() == [*decodes, (b, 4, True)]
    assert driver.step() == decodes


def test_where_nobody_decodes_prompts_get_the_whole_step():
    driver = Driver(max_num_batched_tokens=40, prefill_beside_decodes=8)
    a, b = (driver.add(prompt(15, first), max_tokens=1, ignore_eos=True) for first in (1, 2))
    assert driver.step() == [(a, 15, True), (b, 15, True)]


def test_the_more_prompt_tokens_wait_the_more_of_them_are_computed_beside_decodes():
    driver = Driver(max_num_batched_tokens=40, prefill_beside_decodes=8)
    [decode] = decoding(driver, 1)
    a, b, *_ = (driver.add(prompt(30, first), max_tokens=1, ignore_eos=True) for first in range(1, 5))
    assert driver.step() == [decode, (a, 15, False)], "an eighth of 120"
    assert driver.step() == [decode, (a, 13, False)], "an eighth of 105"
    assert driver.step() == [decode, (a, 2, True), (b, 9, False)], "an eighth of 92"


def test_who_waits_for_a_seat_does_not_make_a_step_longer():
    driver = Driver(max_num_batched_tokens=40, prefill_beside_decodes=8, max_num_seqs=4)
    decodes = decoding(driver, 3)
    first, *_ = (driver.add(prompt(15, first), max_tokens=1, ignore_eos=True) for first in range(1, 16))
    assert driver.step() == [*decodes, (first, 8, False)]
    assert driver.step() == [*decodes, (first, 7, True)]


def test_beside_decodes_a_long_prompt_leaves_half_to_those_behind_it_and_goes_on_all_the_same():
    driver = Driver(max_num_batched_tokens=40, prefill_beside_decodes=8, long_prefill_token_threshold=20)
    decodes = decoding(driver, 5)
    long = driver.add(prompt(40, 1), max_tokens=1, ignore_eos=True)
    assert driver.step() == [*decodes, (long, 8, False)]
    a, b = (driver.add(prompt(5, first), max_tokens=1, ignore_eos=True) for first in (2, 3))
    assert driver.step() == [*decodes, (long, 4, False), (a, 4, False)]
    assert driver.step() == [*decodes, (long, 4, False), (a, 1, True), (b, 4, False)]
    assert driver.step() == [*decodes, (long, 8, False), (b, 1, True)]
    assert driver.step() == [*decodes, (long, 8, False)]


def test_a_request_that_lacks_one_token_of_a_cached_prompt_begins_beside_decodes():
    driver = Driver(max_num_batched_tokens=40, prefill_beside_decodes=1, block_size=4)
    driver.add(prompt(9, 1), max_tokens=1, ignore_eos=True)
    driver.step()
    decodes = decoding(driver, 2)
    again = driver.add(prompt(9, 1), max_tokens=1, ignore_eos=True)
    assert driver.step() == [*decodes, (again, 1, True)]


def test_a_prefill_that_ranks_first_leaves_a_token_to_every_decode():
    driver = Driver(max_num_batched_tokens=16, policy="priority", block_size=8)
    low = [driver.add(prompt(3, first), max_tokens=9, ignore_eos=True, priority=5) for first in (1, 2, 3)]
    driver.step()
    high = driver.add(prompt(40, 9), max_tokens=1, ignore_eos=True, priority=-1)
    decodes = [(request, 1, True) for request in low]
    assert driver.step() == [*decodes, (high, 13, False)]
    assert driver.step() == [(high, 13, False), *decodes]
    assert driver.step() == [(high, 13, False), *decodes]
    assert driver.step() == [(high, 1, True), *decodes]


# Policies


def test_priority_admits_the_lowest_number_first_and_the_earlier_of_equals():
    driver = Driver(policy="priority", max_num_seqs=1)
    order = [driver.add(prompt(3, 1), max_tokens=1, priority=priority) for priority in (2, 0, 1, 0)]
    ran = [driver.step()[0][0] for _ in order]
    assert ran == [order[1], order[3], order[2], order[0]]


def test_priority_takes_the_blocks_of_the_lowest_priority_and_of_the_latest_among_equals():
    driver = Driver(policy="priority", num_blocks=8, max_model_len=16, enable_prefix_caching=False)
    low = driver.add(prompt(7, 1), max_tokens=6, ignore_eos=True, priority=2)
    high = driver.add(prompt(7, 2), max_tokens=6, ignore_eos=True, priority=0)
    middle = driver.add(prompt(7, 3), max_tokens=6, ignore_eos=True, priority=1)
    late = driver.add(prompt(7, 4), max_tokens=6, ignore_eos=True, priority=1)  # 2 blocks each, then 3
    seen = [{request for request, *_ in driver.step()} for _ in range(5)]
    assert seen[:2] == [{low, high, middle, late}] * 2
    assert seen[2] == {high, middle}, "both of lower rank have given up theirs"
    assert driver.core.take_stats().num_preemptions == 2
    driver.drain()
    assert list(driver.finished) == [high, middle, late, low]


def test_the_deadline_policy_serves_the_earliest_first_and_does_not_run_what_is_late():
    driver = Driver(policy="deadline", max_num_seqs=1)
    late = driver.add(prompt(3, 1), max_tokens=9, ignore_eos=True, deadline=1.5)
    never = driver.add(prompt(3, 2), max_tokens=1, ignore_eos=True)
    soon = driver.add(prompt(3, 3), max_tokens=1, ignore_eos=True, deadline=1.0)
    gone = driver.add(prompt(3, 4), max_tokens=1, ignore_eos=True, deadline=0.5)
    driver.now = 0.6
    assert driver.step() == [(soon, 3, True)]
    assert driver.finished[gone] == (FinishReason.DEADLINE, None)
    assert driver.step() == [(late, 3, True)]
    assert driver.step() == [(late, 1, True)]
    driver.now = 1.5
    assert driver.step() == [(never, 3, True)]
    assert driver.finished[late] == (FinishReason.DEADLINE, None)
    assert len(driver.tokens[late]) == 2
    driver.drain()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_other_policies_leave_deadlines_to_the_client(policy):
    driver = Driver(policy=policy)
    request = driver.add(prompt(3, 1), max_tokens=2, ignore_eos=True, deadline=1.0)
    driver.now = 2.0
    driver.drain()
    assert driver.finished[request][0] is FinishReason.LENGTH


# Planning ahead


def test_a_plan_that_was_made_ahead_is_what_would_have_been_decided_later():
    def batches(*, ahead: bool) -> list[list[tuple[int, int, bool]]]:
        driver = Driver(max_num_batched_tokens=12, long_prefill_token_threshold=6)
        for length in (3, 20, 9, 4):
            driver.add(prompt(length, length), max_tokens=5, ignore_eos=True)
        driver.drain(ahead=ahead)
        return driver.runner.batches

    assert batches(ahead=True) == batches(ahead=False)


def test_planning_ahead_can_be_switched_off():
    held = []
    for plan_ahead in (True, False):
        driver = Driver(block_size=1, plan_ahead=plan_ahead)
        driver.add(prompt(3), max_tokens=9, ignore_eos=True)
        driver.begin()
        driver.core.plan_ahead()
        held.append(driver.num_held_blocks)
        driver.end()
        driver.drain(ahead=True)
    assert held == [4, 3], "the block of the next step, and not yet"


def test_who_ends_or_is_aborted_in_a_step_is_not_in_the_next_one():
    driver = Driver()
    eos = next(seed for seed in range(1000) if next_token([1, 2, 2], seed) == EOS)
    ends = driver.add(prompt(3, 1), max_tokens=9, seed=eos)
    aborted = driver.add(prompt(4, 2), max_tokens=9, ignore_eos=True)
    stays = driver.add(prompt(5, 3), max_tokens=9, ignore_eos=True)
    driver.begin()
    driver.core.plan_ahead()
    driver.abort(aborted)
    driver.end()
    assert driver.finished[ends] == (FinishReason.STOP, None)
    assert driver.step() == [(stays, 1, True)]


def test_who_arrives_after_the_plan_is_in_the_next_step_all_the_same():
    driver = Driver()
    a = driver.add(prompt(3, 1), max_tokens=9, ignore_eos=True)
    driver.begin()
    driver.core.plan_ahead()
    b = driver.add(prompt(4, 2), max_tokens=9, ignore_eos=True)
    driver.end()
    assert driver.step() == [(a, 1, True), (b, 4, True)]


def test_planning_ahead_takes_nobodys_blocks():
    driver = Driver(num_blocks=4, block_size=4, max_model_len=16, enable_prefix_caching=False)
    a = driver.add(prompt(7, 1), max_tokens=2, ignore_eos=True)
    b = driver.add(prompt(7, 2), max_tokens=5, ignore_eos=True)
    driver.step()
    driver.begin()  # both fill their second block, and a ends
    driver.core.plan_ahead()
    driver.end()
    assert driver.step() == [(b, 1, True)]
    assert driver.core.take_stats().num_preemptions == 0
    assert a in driver.finished


# Drafts


def test_drafts_save_steps_and_change_nothing():
    plain, drafting = Driver(), Driver(drafts=True)
    for driver in (plain, drafting):
        for seed in range(3):
            driver.add(prompt(5, seed + 1), max_tokens=30, seed=seed, logprobs=0, ignore_eos=True)
        driver.drain(ahead=True)
    assert drafting.tokens == plain.tokens
    assert len(drafting.runner.batches) < len(plain.runner.batches) / 1.5
    stats = drafting.core.take_stats()
    assert stats.num_draft_tokens == drafting.runner.num_drafts
    assert stats.num_accepted_tokens == drafting.runner.num_kept_drafts == sum(stats.accepted_per_position)
    assert stats.num_generation_tokens == 90


def test_drafts_take_only_what_others_leave():
    driver = Driver(drafts=True, max_num_batched_tokens=10)
    a = driver.add(prompt(3, 1), max_tokens=30, ignore_eos=True)
    driver.step()
    b = driver.add(prompt(16, 2), max_tokens=1, ignore_eos=True)
    assert driver.step() == [(a, 1, True), (b, 9, False)]
    step = {request: count for request, count, _ in driver.step()}
    assert step == {a: 3, b: 7}, "two drafts in what is left of the budget"
    driver.drain()


# Holding


def test_a_hold_keeps_the_waiting_out_or_stops_everything():
    driver = Driver()
    a = driver.add(prompt(3, 1), max_tokens=9, ignore_eos=True)
    driver.step()
    driver.core.hold(new_only=True)
    b = driver.add(prompt(3, 2), max_tokens=9, ignore_eos=True)
    assert driver.step() == [(a, 1, True)]
    driver.core.hold(new_only=False)
    assert driver.step() == []
    assert driver.core.has_work
    driver.core.release()
    assert driver.step() == [(a, 1, True), (b, 3, True)]


def test_preempting_everybody_empties_the_cache_and_loses_nothing():
    driver = Driver()
    requests = [driver.add(prompt(6, first), max_tokens=9, ignore_eos=True) for first in (1, 2)]
    driver.step()
    driver.step()
    assert driver.core.reset_prefix_cache(preempt_running=True)
    assert driver.num_held_blocks == 0
    assert driver.step() == [(request, 8, True) for request in requests], "nothing was left to be found"
    driver.drain()


def test_of_different_audio_one_begins_in_a_step_and_who_hears_the_same_with_it():
    driver = Driver()
    ids = [
        driver.add(prompt(3, first), audio=audio, max_tokens=4, ignore_eos=True)
        for first, audio in enumerate(["x", "x", "y", "z"])
    ]
    steps = [[request for request, *_ in driver.step()] for _ in range(3)]
    assert steps == [ids[:2], ids[:3], ids]
