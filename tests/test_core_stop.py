from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from helpers_core import Driver
from trioserve.core.engine import EngineCore
from trioserve.core.request import CoreRequest
from trioserve.outputs import FinishReason
from trioserve.sampling_params import RepetitionDetection, SamplingParams
from trioserve.worker.batch import SampledToken, SequenceOutput

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

    def execute(self, batch: StepBatch) -> list[SequenceOutput]:
        self.stop_token_ids = batch.sequences[0].stop_token_ids
        return [SequenceOutput(tokens=[SampledToken(next(self._script))])]


def run(script: list[int], *, prompt_length: int = 2, **params):
    """Tokens, finish reason and stop token id of a request for which the model draws `script`."""
    driver = Driver(num_blocks=8, max_num_seqs=1, max_model_len=MAX_MODEL_LEN, eos_token_ids=[EOS, OTHER_EOS])
    core = EngineCore(ScriptedRunner(script), driver.scheduler)
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
        core.finish(plan, core.execute(plan))
        result = core.take_result()
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


def test_a_pattern_that_repeats_ends_the_request():
    detection = RepetitionDetection(max_pattern_size=3, min_pattern_size=2, min_count=3)
    script = [5, 5, 5, 5, 4, 6, 7, 8, 6, 7, 8, 9]
    tokens, reason, _ = run(script, repetition_detection=detection, prompt_length=1)
    assert (tokens, reason) == ([5, 5, 5, 5, 4, 6, 7, 8, 6, 7, 8], FinishReason.LENGTH), "6 7 8 occurs twice"


@pytest.mark.parametrize(
    ("script", "sizes", "count", "length"),
    [
        ([5, 5, 5, 5, 5, 5], (1, 3), 3, 3),
        ([5, 5, 5, 5, 5, 5], (2, 3), 2, 4),
        ([7, 5, 6, 5, 6, 5, 6], (1, 2), 3, 7),
        ([4, 5, 6, 4, 5, 6, 4, 5, 6], (1, 4), 2, 6),
        ([4, 5, 4, 6, 4, 5, 4, 6], (3, 4), 2, 8),
    ],
)
def test_where_a_repetition_is_found(script, sizes, count, length):
    detection = RepetitionDetection(min_pattern_size=sizes[0], max_pattern_size=sizes[1], min_count=count)
    tokens, reason, _ = run(script, repetition_detection=detection)
    assert (len(tokens), reason) == (length, FinishReason.REPETITION)
