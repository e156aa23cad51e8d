"""What a speech model may write next, against transformers' processors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_worker import scheduled_sequence
from trioserve.errors import InvalidRequestError, ModelNotSupportedError
from trioserve.sampling_params import SamplingParams
from trioserve.worker.histories import History
from trioserve.worker.rows import rows_of
from trioserve.worker.sampler import Sampler
from trioserve.worker.speech_rules import SpeechRules

if TYPE_CHECKING:
    from pathlib import Path

    from trioserve.worker.batch import ScheduledSequence

EOT, NO_TIMESTAMPS, BEGIN, VOCAB = 20, 25, 26, 60
RULES = SpeechRules(
    eot=EOT,
    no_timestamps=NO_TIMESTAMPS,
    suppressed=(3, 7, 24),
    suppressed_at_begin=(5, EOT),
    max_initial_timestamp=10,
)
TIMESTAMPS = SamplingParams(temperature=0, extra_args={"timestamps": True})
PLAIN = SamplingParams(temperature=0, extra_args={"timestamps": False})


def sequence(
    params: SamplingParams, output: list[int] | None = None, drafts: list[int] | None = None
) -> ScheduledSequence:
    drafts = drafts or []
    return scheduled_sequence(
        params=params,
        output_token_ids=output or [],
        token_ids=[0, *drafts],
        num_drafts=len(drafts),
    )


def expected(output: list[int], logits: np.ndarray, *, timestamps: bool) -> np.ndarray:
    import torch
    from transformers import GenerationConfig
    from transformers.generation import logits_process

    prompt = [21, NO_TIMESTAMPS]
    config: Any = GenerationConfig(
        no_timestamps_token_id=NO_TIMESTAMPS, eos_token_id=EOT, max_initial_timestamp_index=10
    )
    processors: list[Any] = [
        logits_process.SuppressTokensAtBeginLogitsProcessor([5, EOT], len(prompt)),
        logits_process.SuppressTokensLogitsProcessor([3, 7, 24]),
    ]
    if timestamps:
        processors.append(logits_process.WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt)))
    scores = torch.from_numpy(logits)[None]
    for processor in processors:
        scores = processor(torch.tensor([[*prompt, *output]]), scores)
    result: np.ndarray = scores[0].numpy()
    return result


outputs = st.lists(st.integers(0, EOT - 1) | st.integers(BEGIN, VOCAB - 1), max_size=6)


@settings(max_examples=150, deadline=None)
@given(output=outputs, seed=st.integers(0, 2**32 - 1), timestamps=st.booleans(), boost=st.floats(-4, 4))
def test_the_rules_are_those_of_transformers(
    output: list[int], seed: int, timestamps: bool, boost: float
) -> None:
    logits = np.random.default_rng(seed).normal(scale=2, size=VOCAB).astype(np.float32)
    logits[BEGIN:] += boost
    params = TIMESTAMPS if timestamps else PLAIN
    found = logits.copy()[None]
    RULES.apply(found, rows_of(sequence(params, output=output), History()))
    np.testing.assert_array_equal(found[0], expected(output, logits, timestamps=timestamps))


def test_drafts_count_as_output() -> None:
    drafted = sequence(TIMESTAMPS, output=[BEGIN], drafts=[8, BEGIN + 4])
    found = np.zeros((3, VOCAB), np.float32)
    RULES.apply(found, rows_of(drafted, History()))
    for row, output in zip(found, [[BEGIN], [BEGIN, 8], [BEGIN, 8, BEGIN + 4]], strict=True):
        np.testing.assert_array_equal(row, expected(output, np.zeros(VOCAB, np.float32), timestamps=True))


def test_who_does_not_ask_for_rules_gets_what_the_model_says() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 3] = 1.0
    sampler = Sampler(VOCAB, speech_rules=RULES)
    plain = sequence(SamplingParams(temperature=0))
    assert [t.token_id for t in sampler.sample(logits, [plain])[0].tokens] == [3]


def test_logprobs_are_those_of_what_the_rules_leave() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [3, 9]] = 5.0, 4.0
    asking = sequence(SamplingParams(temperature=0, logprobs=1, extra_args={"timestamps": False}))
    (token,) = Sampler(VOCAB, speech_rules=RULES).sample(logits, [asking])[0].tokens
    assert token.logprobs is not None
    num_left = VOCAB - 3 - 2  # neither suppressed nor so at the beginning
    assert token.token_id == 9
    assert token.logprobs.logprobs[0] == pytest.approx(4 - np.log(np.exp(4) + num_left - 1), abs=1e-5)


def test_they_are_read_from_the_models_files(tmp_path: Path) -> None:
    found: dict[str, object] = {"no_timestamps_token_id": 25, "eos_token_id": 20, "suppress_tokens": [3]}
    (tmp_path / "generation_config.json").write_text(json.dumps(found))
    rules = SpeechRules.from_directory(tmp_path)
    assert (rules.eot, rules.no_timestamps, rules.suppressed, rules.suppressed_at_begin) == (20, 25, (3,), ())
    assert rules.max_initial_timestamp == 50
    (tmp_path / "generation_config.json").write_text("{}")
    with pytest.raises(ModelNotSupportedError, match=r"generation_config\.json"):
        SpeechRules.from_directory(tmp_path)


@pytest.mark.parametrize("value", ["yes", 1, [True]])
def test_timestamps_are_wanted_or_not(value: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"timestamps must be true or false"):
        SpeechRules.check(SamplingParams(extra_args={"timestamps": value}))
    SpeechRules.check(SamplingParams(extra_args={"timestamps": True, "other": 1}))
