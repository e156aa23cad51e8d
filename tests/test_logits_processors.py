"""Custom logits processors: how they are found, what they see, and what their mistakes do."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from helpers_sampler import FakeGrammar, drawn, random_logits, sample
from helpers_worker import GREEDY, engine_config, resolved, scheduled_sequence, tiny_llama
from trioserve.errors import InvalidConfigError, InvalidRequestError
from trioserve.sampling_params import SamplingParams
from trioserve.worker.logits_processors import (
    ENTRY_POINT_GROUP,
    LogitsRow,
    ProcessorContext,
    load_processors,
)
from trioserve.worker.model_runner import ModelRunner
from trioserve.worker.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

CONTEXT = ProcessorContext(vocab_size=20, max_num_seqs=4, max_model_len=64, eos_token_ids=(2,))


class Force:
    """Rows whose extra_args name a token get that one."""

    def __init__(self, context: ProcessorContext) -> None:
        self.context = context

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        token = (params.extra_args or {}).get("force", 0)
        if not isinstance(token, int):
            raise InvalidRequestError(
                f"extra_args.force must be a token id, got {token!r}.", parameter="extra_args"
            )

    def is_argmax_invariant(self) -> bool:
        return False

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
        for index, row in enumerate(rows):
            token = (row.params.extra_args or {}).get("force")
            if token is not None:
                logits[index] = -torch.inf
                logits[index, token] = 1.0
        return logits


class Doing:
    """A processor made for one test."""

    def __init__(self, change: Callable[..., Any], *, invariant: bool = False) -> None:
        self._change = change
        self._invariant = invariant
        self.calls = 0

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return self._invariant

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
        self.calls += 1
        return self._change(logits, rows)


class Careless(Force):
    """Takes for granted what clients send."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        assert (params.extra_args or {})["force"] + 1


def _forced(token: int, **fields: Any) -> SamplingParams:
    return SamplingParams(extra_args={"force": token}, **fields)


@pytest.mark.parametrize("extra_args", [None, {"force": "x"}, {"force": -1}])
def test_whatever_a_check_raises_is_that_requests_refusal(directory: Path, extra_args: Any) -> None:
    runner = ModelRunner(resolved(directory), engine_config(logits_processors=(f"{__name__}:Careless",)))
    runner.check_params(_forced(7))
    with pytest.raises(InvalidRequestError, match=r"Careless cannot process this request: .*Error"):
        runner.check_params(SamplingParams(extra_args=extra_args))


def test_by_module_path(directory: Path) -> None:
    config = engine_config(logits_processors=(f"{__name__}:Force",))
    runner = ModelRunner(resolved(directory), config)
    runner.allocate_kv_cache(4)
    runner.check_params(_forced(7))
    with pytest.raises(InvalidRequestError, match=r"force must be a token id, got 'x'"):
        runner.check_params(SamplingParams(extra_args={"force": "x"}))
    from trioserve.worker.batch import StepBatch

    rows = [
        scheduled_sequence(params=params, block_tables=[[block]])
        for block, params in enumerate((_forced(7), _forced(8, temperature=0.0), GREEDY))
    ]
    outputs = runner.execute(StepBatch(rows))
    assert [drawn(output) for output in outputs[:2]] == [[7], [8]]
    plain = ModelRunner(resolved(directory), engine_config())
    plain.allocate_kv_cache(4)
    assert drawn(outputs[2]) == drawn(plain.execute(StepBatch(rows))[2])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(directory)
    return directory


def test_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_point = importlib.metadata.EntryPoint("force", f"{__name__}:Force", ENTRY_POINT_GROUP)

    def entry_points(*, group: str) -> list[importlib.metadata.EntryPoint]:
        return [entry_point] if group == "trioserve.logits_processors" else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    [processor] = load_processors([], CONTEXT)
    assert isinstance(processor, Force)
    assert processor.context is CONTEXT
    assert len(load_processors([f"{__name__}:Force"], CONTEXT)) == 1  # it is the same one


def _module_with(monkeypatch: pytest.MonkeyPatch, **contents: object) -> None:
    module = ModuleType("somebodys_module")
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, module.__name__, module)


class _Lacking:
    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        pass


class _Failing(Force):
    def __init__(self, context: ProcessorContext) -> None:
        raise RuntimeError("no disk")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Force", "must be written module:Class"),
        ("no_such_module:Force", "cannot be loaded: ModuleNotFoundError"),
        ("somebodys_module:Nothing", "cannot be loaded: AttributeError"),
        ("somebodys_module:function", "is no class"),
        ("somebodys_module:Lacking", "has no method is_argmax_invariant, apply"),
        ("somebodys_module:Failing", "cannot be made: RuntimeError.'no disk'."),
    ],
)
def test_one_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, name: str, problem: str) -> None:
    _module_with(monkeypatch, function=len, Lacking=_Lacking, Failing=_Failing)
    with pytest.raises(InvalidConfigError, match=problem) as caught:
        load_processors([name], CONTEXT)
    assert caught.value.field == "logits_processors"
    assert name in str(caught.value)


PLAIN = """
import sys
from trioserve.worker.logits_processors import ProcessorContext, load_processors

class Plain:
    def __init__(self, context): pass
    def validate_params(params): pass
    def is_argmax_invariant(self): return True
    def apply(self, logits, rows): return logits

context = ProcessorContext(vocab_size=20, max_num_seqs=4, max_model_len=64, eos_token_ids=(2,))
for names in [], ["__main__:Plain"]:
    load_processors(names, context)
    print("torch" in sys.modules)
"""


def test_torch_is_brought_where_they_are_loaded_and_not_by_the_first_step() -> None:
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_what_a_processor_sees() -> None:
    seen: list[LogitsRow] = []

    def look(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
        seen.extend(rows)
        return logits

    params = SamplingParams(extra_args={"a": 1})
    rows = [
        scheduled_sequence(
            request_id=5, params=params, seed=8, prompt_token_ids=[1, 2], output_token_ids=[3]
        ),
        scheduled_sequence(
            request_id=6, prompt_token_ids=[4], output_token_ids=[7], token_ids=[7, 8, 9], num_drafts=2
        ),
    ]
    sample(random_logits(4, 20), rows, Sampler(20, [Doing(look)]))
    assert [row.request_id for row in seen] == [5, 6, 6, 6]
    assert [list(row.output_token_ids) for row in seen] == [[3], [7], [7, 8], [7, 8, 9]]
    assert [list(row.prompt_token_ids) for row in seen] == [[1, 2], [4], [4], [4]]
    assert seen[0].params.extra_args == {"a": 1}
    assert seen[0].seed == 8


def test_they_act_one_after_the_other_and_may_return_new_logits() -> None:
    add = Doing(lambda logits, rows: logits + torch.arange(4.0) * 10)
    negate = Doing(lambda logits, rows: -logits)
    for processors, expected in (([add], 3), ([add, negate], 0), ([negate, add], 3)):
        [output] = sample(torch.zeros(1, 4), [scheduled_sequence()], Sampler(4, processors))
        assert drawn(output) == [expected]


def test_one_that_keeps_the_highest_is_not_asked_where_all_are_greedy() -> None:
    processor = Doing(lambda logits, rows: logits * 2, invariant=True)
    sampler = Sampler(10, [processor])
    penalised = SamplingParams(temperature=0.0, presence_penalty=1.0)
    sample(random_logits(2, 10), [scheduled_sequence(), scheduled_sequence(params=penalised)], sampler)
    assert processor.calls == 0
    sample(random_logits(2, 10), [scheduled_sequence(), scheduled_sequence(params=SamplingParams())], sampler)
    assert processor.calls == 1


def test_it_cannot_bring_back_what_the_grammar_or_the_request_bars() -> None:
    sampler = Sampler(5, [Doing(lambda logits, rows: torch.arange(5.0).repeat(len(logits), 1))])
    rows = [
        scheduled_sequence(grammar=FakeGrammar([{1, 2}])),
        scheduled_sequence(params=SamplingParams(temperature=0.0, allowed_token_ids=(0, 3))),
        scheduled_sequence(),
    ]
    assert [drawn(output) for output in sample(torch.zeros(3, 5), rows, sampler)] == [[2], [3], [4]]


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
def test_a_row_that_it_leaves_nothing_of_fails_alone(value: float) -> None:
    def spoil(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
        logits[1] = value
        return logits

    rows = [scheduled_sequence(params=SamplingParams(), seed=seed) for seed in range(3)]
    outputs = sample(random_logits(3, 5), rows, Sampler(5, [Doing(spoil)]))
    assert [len(output.tokens) for output in outputs] == [1, 0, 1]
    assert "logits processor" in (outputs[1].failure or "")


def test_a_spoiled_row_behind_a_wrong_draft_does_not_matter() -> None:
    def spoil(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
        logits[1] = torch.nan
        return logits

    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    wrong, right = (scheduled_sequence(token_ids=[0, draft], num_drafts=1) for draft in (0, 1))
    sampler = Sampler(2, [Doing(spoil)])
    assert drawn(sample(logits, [wrong], sampler)[0]) == [1]
    assert sample(logits, [right], sampler)[0].failure is not None


@pytest.mark.parametrize("result", [None, torch.zeros(1, 4), torch.zeros(1, 5, dtype=torch.float64)])
def test_logits_of_another_shape_are_refused(result: object) -> None:
    sampler = Sampler(5, [Doing(lambda logits, rows: result)])
    with pytest.raises(TypeError, match=r"Doing\.apply must return float32 logits of shape \(1, 5\)"):
        sample(torch.zeros(1, 5), [scheduled_sequence()], sampler)
