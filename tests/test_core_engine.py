from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hash_model import GrammarForm
from helpers_core import Driver
from trioserve.core.engine import EngineCore
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from trioserve.core.step_result import StepResult


def _results(driver: Driver) -> list[StepResult]:
    results = []
    while driver.core.has_work:
        plan = driver.core.schedule()
        driver.core.finish(plan, driver.core.execute(plan))
        results.append(driver.core.take_result())
    return results


def test_a_streaming_request_is_reported_token_by_token():
    driver = Driver(max_num_batched_tokens=4)
    request = driver.add([1, 2, 3, 4, 5, 6], max_tokens=3, ignore_eos=True)
    results = _results(driver)
    assert [result.request_ids for result in results] == [[], [request], [request], [request]]
    assert [len(tokens) for result in results for tokens in result.token_ids] == [1, 1, 1]
    assert [reason for result in results for reason in result.finish_reasons] == [
        None,
        None,
        FinishReason.LENGTH,
    ]


def test_a_request_that_does_not_stream_is_reported_once_with_everything():
    driver = Driver()
    streaming = driver.add([1, 2, 3], max_tokens=4, ignore_eos=True, logprobs=0)
    final = driver.add([1, 2, 3], max_tokens=4, ignore_eos=True, logprobs=0, streams=False)
    results = _results(driver)
    assert [result.request_ids for result in results] == [[streaming]] * 3 + [[streaming, final]]
    last = results[-1]
    assert last.token_ids[1] == [token for result in results for token in result.token_ids[0]]
    assert [token.logprobs.logprobs for token in last.sampled[1]] == [[-3.0], [-4.0], [-5.0], [-6.0]]
    assert last.finish_reasons[1] is FinishReason.LENGTH


def test_an_aborted_request_is_not_reported():
    driver = Driver()
    for streams in (True, False):
        request = driver.add([1, 2, 3], max_tokens=1, streams=streams)
        plan = driver.core.schedule()
        outputs = driver.core.execute(plan)
        driver.core.abort([request])
        driver.core.finish(plan, outputs)
        assert driver.core.take_result().request_ids == []
    assert not driver.core.has_work
    assert driver.num_held_blocks == 0


def test_without_work_there_is_no_step():
    driver = Driver()
    assert not driver.core.has_work
    assert driver.core.schedule() is None


@pytest.mark.parametrize("drafts", [False, True])
def test_a_match_that_is_complete_with_the_last_token_allowed_is_a_stop(drafts: bool):
    driver = Driver(drafts=drafts)
    whole = driver.add([1, 2, 3], max_tokens=2, grammar=GrammarForm((3, 4)))
    cut = driver.add([1, 2, 3], max_tokens=2, grammar=GrammarForm((3, 4, 5)))
    driver.drain()
    assert driver.tokens == {whole: [3, 4], cut: [3, 4]}
    assert driver.finished == {whole: (FinishReason.STOP, "grammar"), cut: (FinishReason.LENGTH, None)}


def test_a_runner_failure_passes_through_and_ends_the_core():
    class BrokenRunner:
        def execute(self, batch):
            raise MemoryError("no memory left")

    driver = Driver()
    core = EngineCore(BrokenRunner(), driver.scheduler)
    driver.add([1, 2, 3], max_tokens=1)
    plan = core.schedule()
    with pytest.raises(MemoryError, match="no memory left"):
        core.execute(plan)
    with pytest.raises(AssertionError, match="has not come back, or it failed"):
        core.schedule()


def test_the_core_imports_no_torch():
    code = "import sys, trioserve.core.engine; print({'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
