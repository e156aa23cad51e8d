from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trioserve.config import SchedulerConfig
from trioserve.core.engine import EngineCore
from trioserve.core.kv_cache import KVCacheManager
from trioserve.core.request import CoreRequest
from trioserve.core.scheduler import Scheduler
from trioserve.outputs import FinishReason
from trioserve.sampling_params import SamplingParams
from trioserve.worker.batch import SampledToken

if TYPE_CHECKING:
    from trioserve.worker.batch import StepBatch

EOS = 0
OTHER_EOS = 1
MAX_MODEL_LEN = 12


class ScriptedRunner:
    """Draws what the script says, whether or not the sampler should have barred it."""

    def __init__(self, script: list[int]) -> None:
        self._script = iter(script)
        self.stop_token_ids: frozenset[int] = frozenset()

    def execute(self, batch: StepBatch) -> list[SampledToken]:
        self.stop_token_ids = batch.sequences[0].stop_token_ids
        return [SampledToken(next(self._script))]


def run(script: list[int], *, prompt_length: int = 2, **params):
    """Tokens, finish reason and stop token id of a request for which the model draws `script`."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64),
        KVCacheManager(8, 4),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[EOS, OTHER_EOS],
    )
    core = EngineCore(ScriptedRunner(script), scheduler)
    core.add(
        CoreRequest(
            request_id=3,
            prompt_token_ids=[9] * prompt_length,
            params=SamplingParams(**{"max_tokens": 100, **params}),
            seed=0,
        )
    )
    tokens: list[int] = []
    while True:
        plan = core.schedule()
        result = core.finish(plan, core.execute(plan))
        assert result.request_ids == [3]
        tokens += result.token_ids[0]
        if result.finish_reasons[0] is not None:
            assert not core.has_work
            return tokens, result.finish_reasons[0], result.stop_token_ids[0]


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_eos_stops_and_is_no_stop_token(eos):
    assert run([5, eos, 6]) == ([5, eos], FinishReason.STOP, None)


def test_a_stop_token_stops_and_is_named():
    assert run([5, 7, 6], stop_token_ids=[8, 7]) == ([5, 7], FinishReason.STOP, 7)


def test_eos_wins_over_the_same_id_among_the_stop_tokens():
    assert run([5, EOS], stop_token_ids=[EOS]) == ([5, EOS], FinishReason.STOP, None)


def test_max_tokens():
    assert run([5, 6, 7], max_tokens=2) == ([5, 6], FinishReason.LENGTH, None)


def test_a_full_context_window():
    assert run([5, 6, 7, 8], prompt_length=9) == ([5, 6, 7], FinishReason.LENGTH, None)


@pytest.mark.parametrize("last", [EOS, 7])
def test_a_stop_at_the_length_limit_is_a_stop(last):
    tokens, reason, _ = run([5, last], max_tokens=2, stop_token_ids=[7])
    assert (tokens, reason) == ([5, last], FinishReason.STOP)


def test_ignore_eos():
    assert run([EOS, 5, OTHER_EOS], ignore_eos=True, max_tokens=3) == (
        [EOS, 5, OTHER_EOS],
        FinishReason.LENGTH,
        None,
    )


def test_an_ignored_eos_still_stops_where_it_is_a_stop_token():
    assert run([5, EOS], ignore_eos=True, stop_token_ids=[EOS]) == ([5, EOS], FinishReason.STOP, EOS)


@pytest.mark.parametrize("stop", [EOS, 7])
def test_nothing_stops_before_min_tokens(stop):
    tokens, reason, _ = run([stop, stop, stop, 5], min_tokens=3, stop_token_ids=[7])
    assert (tokens, reason) == ([stop] * 3, FinishReason.STOP)


def test_min_tokens_does_not_lift_the_length_limits():
    assert run([5] * 9, min_tokens=2, max_tokens=2) == ([5, 5], FinishReason.LENGTH, None)
    assert run([5] * 9, min_tokens=8, prompt_length=9) == ([5] * 3, FinishReason.LENGTH, None)
