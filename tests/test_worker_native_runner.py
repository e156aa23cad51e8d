"""Requests through scheduler, cache, native kernels and sampler: what they get is the same in any company."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers_native import TIERS
from helpers_worker import (
    DrivenSequence,
    engine_config,
    resolved,
    run_step,
    tiny_gemma3,
    tiny_llama,
)
from trioserve.core.engine import EngineCore
from trioserve.core.request import CoreRequest
from trioserve.errors import ModelNotSupportedError
from trioserve.sampling_params import SamplingParams
from trioserve.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from trioserve.config import ResolvedModel
    from trioserve.core.stats import CoreStats

pytestmark = [
    pytest.mark.skipif(not TIERS, reason="no native kernels were built"),
    pytest.mark.usefixtures("same_number_of_threads"),
]

_LENGTH = 24
Told = tuple[list[int], list[float]]
"""Tokens, and the logprobs of each and of the two likeliest beside it."""


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def _model(directory: Path, tiny: Any = tiny_llama, **changes: Any) -> ResolvedModel:
    theirs = tiny(**changes)
    theirs.save_pretrained(directory)
    return resolved(directory, architecture=type(theirs).__name__, dtype="bfloat16")


def _run(
    model: ResolvedModel, prompts: list[list[int]], num_blocks: int, **args: Any
) -> tuple[list[Told], CoreStats]:
    """What each prompt gets, all of them given at once."""
    config = engine_config(**{"block_size": 16} | args)
    params = SamplingParams(temperature=0, max_tokens=_LENGTH, logprobs=2, ignore_eos=True)
    told: list[Told] = [([], []) for _ in prompts]
    with closing(ModelRunner(model, config)) as runner:
        runner.allocate_kv_cache(num_blocks)
        core = EngineCore.from_config(runner, config, model, num_blocks=num_blocks)
        for number, prompt in enumerate(prompts):
            core.add(CoreRequest(request_id=number, prompt_token_ids=prompt, params=params, seed=0))
        while (plan := core.schedule()) is not None:
            outputs = core.execute(plan)
            for sequence, output in zip(plan.batch.sequences, outputs, strict=True):
                for token in output.tokens:
                    assert token.logprobs is not None
                    told[sequence.request_id][0].append(token.token_id)
                    told[sequence.request_id][1].extend(token.logprobs.logprobs)
            core.finish(plan, outputs)
        return told, core.take_stats()


@pytest.mark.parametrize("tiny", [tiny_llama, tiny_gemma3])
def test_company_chunks_known_prefixes_and_preemptions_change_nothing(
    tiny: Any, tier: str, tmp_path: Path
) -> None:
    """Not one bit of any logprob."""
    model = _model(tmp_path, tiny)
    rng = random.Random(3)
    beginning = rng.choices(range(101), k=40)
    prompts = [rng.choices(range(101), k=rng.randint(1, 70)) for _ in range(4)]
    prompts += [beginning + rng.choices(range(101), k=rng.randint(1, 30)) for _ in range(4)]
    alone = []
    for prompt in prompts:
        [told], _ = _run(model, [prompt], 200, cpu_kernels=tier, max_num_batched_tokens=128)
        assert len(told[0]) == _LENGTH
        alone.append(told)
    num_blocks = 14 if tiny is tiny_llama else 40
    together, stats = _run(model, prompts, num_blocks, cpu_kernels=tier, max_num_batched_tokens=24)
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert together == alone


@pytest.fixture
def runner(tier: str, tmp_path: Path) -> Any:
    with closing(ModelRunner(_model(tmp_path), engine_config(block_size=16, cpu_kernels=tier))) as runner:
        runner.allocate_kv_cache(32)
        yield runner


def test_the_shortest_way_to_a_token_leads_to_the_same_one(runner: ModelRunner) -> None:
    """Greedy without logits, and with them."""
    plain = [DrivenSequence(prompt=[7 * n, 3, n], blocks=[n]) for n in range(8)]
    with_logprobs = SamplingParams(temperature=0, logprobs=0)
    others = [
        DrivenSequence(prompt=sequence.prompt, blocks=[8 + n], params=with_logprobs)
        for n, sequence in enumerate(plain)
    ]
    for _ in range(10):
        run_step(runner, [(sequence, 9) for sequence in plain])
        run_step(runner, [(sequence, 9) for sequence in others])
    assert [sequence.output for sequence in plain] == [sequence.output for sequence in others]
    assert len({tuple(sequence.output) for sequence in plain}) > 1


def test_logits_that_are_no_numbers_fail_their_own_sequence(tier: str, tmp_path: Path) -> None:
    model = _model(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][9] = torch.nan
    path.unlink()
    save_file(tensors, path)
    with closing(ModelRunner(model, engine_config(block_size=16, cpu_kernels=tier))) as runner:
        runner.allocate_kv_cache(8)
        good, bad = DrivenSequence(prompt=[5, 6], blocks=[0]), DrivenSequence(prompt=[5, 9], blocks=[1])
        outputs = run_step(runner, [(good, 2), (bad, 2)])
    assert outputs[0].failure is None
    assert len(outputs[0].tokens) == 1
    assert outputs[1].failure is not None
    assert not outputs[1].tokens


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_close_ends_the_threads(tmp_path: Path) -> None:
    model = _model(tmp_path)
    before = _threads()
    runner = ModelRunner(model, engine_config(block_size=16, threads=3))
    assert _threads() == before + 2
    runner.close()
    runner.close()
    assert _threads() == before


def test_a_checkpoint_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    model = _model(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    path.unlink()
    save_file(tensors, path)
    before = _threads()
    with pytest.raises(ModelNotSupportedError, match=r"lacks model\.norm\.weight"):
        ModelRunner(model, engine_config(block_size=16, threads=3))
    assert _threads() == before


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_sleeping_gives_memory_back(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "head_dim": 256}
    model = _model(tmp_path, num_key_value_heads=4, **wide)
    weights = (tmp_path / "model.safetensors").stat().st_size // 2  # float32 there, bfloat16 here
    with closing(ModelRunner(model, engine_config(block_size=16))) as runner:
        num_blocks = 30_000_000 // runner.bytes_per_block
        runner.allocate_kv_cache(num_blocks)
        tables = [[*range(block, block + 7)] for block in range(0, num_blocks - 7, 7)]

        def use() -> list[int]:
            sequences = [DrivenSequence(prompt=list(range(3, 100)), blocks=table) for table in tables]
            run_step(runner, [(sequence, 97) for sequence in sequences])
            return [sequence.output[0] for sequence in sequences]

        tokens = use()
        awake = _resident_bytes()
        runner.free_kv_cache()
        cache = awake - _resident_bytes()
        assert cache > 20_000_000
        runner.free_weights()
        asleep = _resident_bytes()
        assert awake - cache - asleep > 0.8 * weights > 25_000_000
        runner.allocate_kv_cache(num_blocks)
        runner.load_weights()
        runner.load_weights()
        assert use() == tokens
        assert _resident_bytes() < awake + 0.2 * weights
