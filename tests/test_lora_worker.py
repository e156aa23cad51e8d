"""Adapters in the native decoders, against transformers with merged weights."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_lora import (
    ALL,
    adapter_json,
    merged,
    random_tensors,
    save_adapter,
    save_random_adapter,
    tensor_name,
)
from helpers_worker import (
    GREEDY,
    DrivenSequence,
    PagedModel,
    engine_config,
    resolved,
    run_step,
    scheduled_sequence,
    tiny_gemma3,
    tiny_llama,
    tiny_qwen2,
)
from trioserve.errors import LoRANotFoundError, ModelNotSupportedError, ModelSourceError
from trioserve.sampling_params import SamplingParams
from trioserve.worker.lora import Delta, make_adapter, step_adapters
from trioserve.worker.lora_files import read_adapter
from trioserve.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import transformers

FAMILIES = [tiny_llama, tiny_qwen2, tiny_gemma3]
PROMPT = random.Random(3).choices(range(101), k=40)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank-stabilized": {"use_rslora": True, "lora_alpha": 5},
    "ranks and alphas of their own": {
        "rank_pattern": {"q_proj": 2, "up_proj": 7},
        "alpha_pattern": {"v_proj": 3, "down_proj": 30},
    },
    "attention only": {"target_modules": ["q_proj", "v_proj"]},
    "MLP only": {"target_modules": ["up_proj", "down_proj"]},
}


def paged_with(theirs: transformers.PreTrainedModel, directory: Path, *adapters: str) -> PagedModel:
    """Adapters are directories below `directory`, and called by these names."""
    theirs.save_pretrained(directory)
    paged = PagedModel(resolved(directory, architecture=type(theirs).__name__))
    for name in adapters:
        file = read_adapter(directory / name, paged.model.config, max_rank=16)
        paged.adapters[name] = make_adapter(file, paged.model.config, paged.model.dtype)
    return paged


def logits_of(paged: PagedModel, lora: str | None, chunks: list[int]) -> torch.Tensor:
    sequence = paged.new_sequence(PROMPT)
    sequence.lora = lora
    return torch.cat([paged.step([(sequence, size)])[0] for size in chunks])


def expected_logits(theirs: transformers.PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = theirs(torch.tensor([prompt])).logits[0]
    return logits


def greedy(theirs: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(expected_logits(theirs, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("tiny", FAMILIES, ids=lambda tiny: tiny.__name__)
def test_logits_are_those_of_merged_weights(
    tiny: Callable[..., Any], variant: dict[str, Any], tmp_path: Path
) -> None:
    theirs = tiny()
    config = adapter_json(**variant)
    tensors = random_tensors(theirs, ranks=config["rank_pattern"], targets=config["target_modules"])
    save_adapter(tmp_path / "a", tensors, config)
    paged = paged_with(theirs, tmp_path, "a")
    expected = expected_logits(merged(theirs, tensors, config), PROMPT)
    assert (expected - expected_logits(theirs, PROMPT)).abs().max() > 0.1, "it must make a difference"
    torch.testing.assert_close(logits_of(paged, "a", [40]), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits_of(paged, "a", [1, 17, 1, 21]), expected, atol=1e-4, rtol=1e-4)


def test_many_adapters_in_one_batch(tmp_path: Path) -> None:
    """With prefills and decodes of all of them, in every step."""
    theirs = tiny_llama()
    with_adapters = {
        "a": save_random_adapter(tmp_path / "a", theirs, seed=1),
        "b": save_random_adapter(tmp_path / "b", theirs, seed=2, r=8),
        "c": save_random_adapter(tmp_path / "c", theirs, seed=3, r=1),
        None: theirs,
    }
    paged = paged_with(theirs, tmp_path, "a", "b", "c")
    rng = random.Random(4)
    sequences = []
    for lora in list(with_adapters) * 3:
        sequence = paged.new_sequence(rng.choices(range(101), k=rng.randrange(3, 20)))
        sequence.lora = lora
        sequences.append(sequence)
    while len(sequences[0].output) < 6:
        paged.greedy([(sequence, rng.randrange(1, 8)) for sequence in sequences])
    for sequence in sequences:
        expected = greedy(with_adapters[sequence.lora], sequence.prompt, len(sequence.output))
        assert sequence.output == expected, sequence.lora


def test_the_runner_gives_the_tokens_of_merged_weights(tmp_path: Path) -> None:
    theirs = tiny_llama()
    theirs.save_pretrained(tmp_path)
    expected = {key: save_random_adapter(tmp_path / key, theirs, seed=ord(key)) for key in "ab"}
    runner = ModelRunner(resolved(tmp_path), engine_config(enable_lora=True))
    try:
        runner.allocate_kv_cache(100)
        for key in "ab":
            runner.add_adapter(key, runner.read_adapter(str(tmp_path / key)))
        blocks = iter(range(100))
        sequences = [
            DrivenSequence(prompt=PROMPT, blocks=[next(blocks) for _ in range(12)], lora=lora)
            for lora in ("a", None, "b")
        ]
        for _ in range(5):
            run_step(runner, [(sequence, 40) for sequence in sequences])
        runner.free_weights()
        runner.load_weights()  # adapters stay
        for _ in range(3):
            run_step(runner, [(sequence, 1) for sequence in sequences])
        runner.remove_adapter("b")
        run_step(runner, [(sequence, 1) for sequence in sequences[:2]])
    finally:
        runner.close()
    for sequence in sequences:
        reference = theirs if sequence.lora is None else expected[sequence.lora]
        assert sequence.output == greedy(reference, PROMPT, len(sequence.output))
    assert [len(sequence.output) for sequence in sequences] == [9, 9, 8]


def test_rows_without_an_adapter_are_what_they_are_without_any(tmp_path: Path) -> None:
    """To the bit, in a batch of the same size."""
    theirs = tiny_llama()
    save_random_adapter(tmp_path / "a", theirs)
    paged = paged_with(theirs, tmp_path, "a")
    found = []
    for others in (None, "a"):
        sequences = [paged.new_sequence(PROMPT[:size]) for size in (9, 7, 12)]
        sequences[0].lora = sequences[2].lora = others
        found.append(paged.step([(sequence, 20) for sequence in sequences]))
    (without, between) = (logits[1] for logits in found)
    assert torch.equal(without, between)
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1, top_p=0.9, logprobs=1)])
def test_an_adapter_that_overflows_spoils_its_own_rows_only(params: SamplingParams, tmp_path: Path) -> None:
    theirs = tiny_llama()
    theirs.save_pretrained(tmp_path)
    tensors = {name: 1e30 * tensor for name, tensor in random_tensors(theirs).items()}
    save_adapter(tmp_path / "huge", tensors, adapter_json())
    runner = ModelRunner(resolved(tmp_path), engine_config(enable_lora=True))
    try:
        runner.allocate_kv_cache(100)
        runner.add_adapter("huge", runner.read_adapter(str(tmp_path / "huge")))
        blocks = iter(range(100))

        def outputs_beside(lora: str | None) -> tuple[list[list[int]], str | None]:
            plain, between, last = (
                DrivenSequence(
                    prompt=PROMPT, blocks=[next(blocks) for _ in range(12)], lora=own, params=params
                )
                for own in (None, lora, None)
            )
            failure = run_step(runner, [(plain, 40), (between, 40), (last, 40)])[1].failure
            for _ in range(3):
                run_step(runner, [(plain, 1), (last, 1)])
            return [plain.output, last.output], failure

        alone, failure = outputs_beside(None)
        assert failure is None
        assert outputs_beside("huge") == (alone, "The model's logits are no finite numbers.")
    finally:
        runner.close()


loras = st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=6)


@given(loras=loras, data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_a_row_gets_does_not_depend_on_the_others(loras: list[str | None], data: st.DataObject) -> None:
    """To the bit, for small integers, whose products are exact in whatever order they are added."""
    lengths = [data.draw(st.integers(1, 4)) for _ in loras]
    sequences = [
        scheduled_sequence(lora=lora, token_ids=[0] * length)
        for lora, length in zip(loras, lengths, strict=True)
    ]
    adapters = {key: {(0, "qkv"): _small_delta(seed)} for seed, key in enumerate("ab")} | {"c": {}}  # type: ignore[dict-item]  # it changes something else
    x = torch.randint(-4, 5, (sum(lengths), 3), generator=torch.Generator().manual_seed(0)).float()
    y = torch.zeros(len(x), 5)
    context = step_adapters(sequences, adapters)
    assert (context is None) == (set(loras) == {None})
    if context is not None:
        context.add(0, "qkv", x, y)
    rows = [lora for lora, length in zip(loras, lengths, strict=True) for _ in range(length)]
    for row, lora in enumerate(rows):
        delta = None if lora is None else adapters[lora].get((0, "qkv"))
        alone = torch.zeros(5) if delta is None else x[row] @ delta.down @ delta.up
        assert torch.equal(y[row], alone)


def _small_delta(seed: int) -> Delta:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-3, 4, (2, 3), generator=generator).float()
    b = torch.randint(-3, 4, (5, 2), generator=generator).float()
    return Delta(a.t(), b.t())


# What is refused


@pytest.fixture
def model(tmp_path: Path) -> Any:
    theirs = tiny_llama()
    theirs.save_pretrained(tmp_path)
    return theirs


def read(directory: Path, model: Any, max_rank: int = 16) -> Any:
    config = PagedModel(resolved(directory.parent)).model.config
    return read_adapter(directory, config, max_rank=max_rank)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA, got 'IA3'"),
        ({"bias": "all"}, "bias must be none, got 'all'"),
        ({"use_dora": True}, "use_dora must be unset, got True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save must be unset, got .'lm_head'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be .* got 'pissa'"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"alpha_pattern": {".*q_proj": 3}}, "alpha_pattern must be a module's name"),
        ({"r": 17}, "rank must be at most max_lora_rank=16, got 17 of model.layers.0"),
        ({"rank_pattern": {"q_proj": 5}}, "has shape .4, 32., this model and its rank ask for .5, 32."),
    ],
)
def test_adapters_that_are_something_else(
    changes: dict[str, Any], message: str, model: Any, tmp_path: Path
) -> None:
    rank = changes.get("r", 4)
    save_adapter(tmp_path / "a", random_tensors(model, rank=rank), adapter_json(**changes))
    with pytest.raises(ModelNotSupportedError, match=message):
        read(tmp_path / "a", model)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("base_model.model.lm_head.lora_A.weight", (4, 32)),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 101)),
        (tensor_name("model.layers.2.mlp.up_proj", "A"), (4, 32)),  # there are two layers
        (tensor_name("model.layers.0.mlp.q_proj", "A"), (4, 32)),
        (tensor_name("model.layers.01.self_attn.q_proj", "A"), (4, 32)),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", (32,)),
    ],
)
def test_tensors_that_are_not_for_this_model(
    name: str, shape: tuple[int, ...], model: Any, tmp_path: Path
) -> None:
    tensors = random_tensors(model) | {name: torch.zeros(shape)}
    save_adapter(tmp_path / "a", tensors, adapter_json())
    with pytest.raises(ModelNotSupportedError, match="is for no matrix that adapters of this model"):
        read(tmp_path / "a", model)


def test_an_adapter_of_a_larger_model(model: Any, tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", random_tensors(tiny_llama(hidden_size=64)), adapter_json())
    with pytest.raises(ModelNotSupportedError, match=r"has shape .*64.*, this model .* ask for .*32"):
        read(tmp_path / "a", model)


def test_damaged_files(model: Any, tmp_path: Path) -> None:
    tensors = random_tensors(model)
    directory = save_adapter(tmp_path / "a", tensors, adapter_json())
    weights, config = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    with weights.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ModelSourceError, match=r"adapter_model\.safetensors cannot be read"):
        read(directory, model)
    weights.unlink()
    with pytest.raises(LoRANotFoundError, match=r"no adapter_model\.safetensors"):
        read(directory, model)
    for content, message in {
        b"\xff": "cannot be read",
        b"[]": "does not hold a JSON object",
        b"{}": "peft_type is required",
        b'{"peft_type": "LORA", "r": "four"}': "r must be an integer",
        b'{"peft_type": "LORA", "r": 0}': "r must be above 0",
        b'{"peft_type": "LORA", "r": 4, "lora_alpha": -1}': "lora_alpha must be above 0",
    }.items():
        save_adapter(directory, tensors, {})
        config.write_bytes(content)
        with pytest.raises(ModelSourceError, match=message):
            read(directory, model)
    config.unlink()
    with pytest.raises(LoRANotFoundError, match=r"no adapter_config\.json"):
        read(directory, model)
    del tensors[tensor_name("model.layers.1.mlp.up_proj", "B")]
    save_adapter(directory, tensors, adapter_json())
    with pytest.raises(ModelSourceError, match=r"only one of model\.layers\.1\.mlp\.up_proj's two matrices"):
        read(directory, model)
    save_adapter(directory, {}, adapter_json())
    with pytest.raises(ModelSourceError, match="no matrices"):
        read(directory, model)
    integers = {name: tensor.to(torch.int8) for name, tensor in random_tensors(model).items()}
    save_adapter(directory, integers, adapter_json())
    with pytest.raises(ModelNotSupportedError, match=r"must be floating-point, .* got torch\.int8"):
        read(directory, model)


def test_all_matrices_can_be_changed(model: Any, tmp_path: Path) -> None:
    save_random_adapter(tmp_path / "a", model)
    file = read(tmp_path / "a", model)
    assert set(file) == {(layer, name) for layer in range(2) for name in ALL}
