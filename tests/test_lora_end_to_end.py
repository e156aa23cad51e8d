"""Adapters in an engine core's process: offline, after its death, and what cannot be loaded."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
import trio

from byte_tokenizer import EOS, VOCAB_SIZE, save_byte_tokenizer
from helpers_lora import adapter_json, random_tensors, save_adapter, save_random_adapter
from helpers_worker import tiny_llama
from trioserve import (
    LLM,
    AsyncLLM,
    EngineArgs,
    EngineStartError,
    InvalidRequestError,
    LoRANotFoundError,
    LoRARequest,
    SamplingParams,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import transformers

PROMPTS = ["The sea", "A longer prompt about the sea", "x"]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str | None, Any]]:
    """A directory with a model and the adapters a, b and c; and each of them in transformers."""
    directory = tmp_path_factory.mktemp("lora")
    theirs = tiny_llama(vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=EOS)
    theirs.save_pretrained(directory)
    save_byte_tokenizer(directory)
    adapters = {
        name: save_random_adapter(directory / name, theirs, seed=seed, lora_alpha=4)
        for seed, name in enumerate("abc")
    }
    return directory, {None: theirs, **adapters}


def expected(theirs: transformers.PreTrainedModel, prompt: str) -> list[int]:
    tokens = list(prompt.encode())
    with torch.inference_mode():
        for _ in range(8):
            tokens.append(int(theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-8:]


def engine_args(directory: Path, **values: Any) -> dict[str, Any]:
    defaults = {"enable_lora": True, "dtype": "float32", "threads": 1, "log": {"stats_interval": 0}}
    return {"model": str(directory), **defaults, **values}


def test_offline(model: tuple[Path, dict[str | None, Any]]) -> None:
    directory, models = model
    requests = {name: LoRARequest(name, lora_path=directory / name) for name in "abc"}
    with LLM(**engine_args(directory, max_loras=2)) as llm:
        names = [None, "a", "b", "c", "a", None, "c", "b", "a"]
        prompts = [PROMPTS[index % 3] for index in range(len(names))]
        adapters = [requests.get(name or "") for name in names]
        outputs = llm.generate(prompts, GREEDY, lora_request=adapters, use_tqdm=False)
        for name, prompt, output in zip(names, prompts, outputs, strict=True):
            assert list(output.outputs[0].token_ids) == expected(models[name], prompt), name
        (one,) = llm.generate("x", GREEDY, lora_request=LoRARequest("b"), use_tqdm=False)
        assert list(one.outputs[0].token_ids) == expected(models["b"], "x")
        with pytest.raises(ValueError, match=r"prompts \(1\) and lora_request \(9\) must be the same"):
            llm.generate("x", GREEDY, lora_request=adapters, use_tqdm=False)
        assert [adapter.name for adapter in llm.list_loras()] == ["a", "b", "c"]
        llm.sleep(level=2)  # adapters stay
        llm.load_lora(LoRARequest("d", lora_path=directory / "b"))
        llm.wake_up()
        for name, adapter in {"a": "a", "d": "b"}.items():
            (one,) = llm.generate("x", GREEDY, lora_request=LoRARequest(name), use_tqdm=False)
            assert list(one.outputs[0].token_ids) == expected(models[adapter], "x")
        llm.unload_lora("a")
        with pytest.raises(LoRANotFoundError):
            llm.generate("x", GREEDY, lora_request=LoRARequest("a"), use_tqdm=False)
        llm.load_lora(LoRARequest("a", lora_path=directory / "c"))
        (one,) = llm.generate("x", GREEDY, lora_request=LoRARequest("a"), use_tqdm=False)
        assert list(one.outputs[0].token_ids) == expected(models["c"], "x")


async def test_after_the_death_of_the_core(
    model: tuple[Path, dict[str | None, Any]], own_children: Callable[[], set[int]]
) -> None:
    directory, models = model
    args = engine_args(
        directory, engine_restart="on-failure", engine_restart_backoff=0.01, lora_modules=[f"a={directory}/a"]
    )
    async with AsyncLLM.from_engine_args(EngineArgs.from_dict(args)) as llm:
        await llm.load_lora(LoRARequest("b", lora_path=str(directory / "b")))
        for is_first in (True, False):
            for name in "ab":
                output = await llm.complete("The sea", GREEDY, lora_request=LoRARequest(name))
                assert list(output.outputs[0].token_ids) == expected(models[name], "The sea")
            if is_first:
                (core,) = own_children()
                os.kill(core, signal.SIGKILL)
                while llm.is_running:  # noqa: ASYNC110 - until it has been noticed
                    await trio.sleep(0.001)
                await llm.wait_ready()


async def test_what_cannot_be_loaded(model: tuple[Path, dict[str | None, Any]], tmp_path: Path) -> None:
    directory, models = model
    save_adapter(tmp_path / "dora", random_tensors(models[None]), adapter_json(use_dora=True))
    args = EngineArgs.from_dict(engine_args(directory, max_lora_rank=2, engine="inproc"))
    async with AsyncLLM.from_engine_args(args) as llm:
        for path, error, message in [
            (directory / "a", InvalidRequestError, "rank must be at most max_lora_rank=2, got 4"),
            (tmp_path / "dora", InvalidRequestError, "use_dora must be unset"),
            (tmp_path, LoRANotFoundError, "it has no adapter_config.json"),
        ]:
            with pytest.raises(error, match=message):
                await llm.complete("x", GREEDY, lora_request=LoRARequest("x", lora_path=str(path)))
        await llm.complete("x", GREEDY)
    args = EngineArgs.from_dict(engine_args(directory, engine="inproc", lora_modules=[f"d={tmp_path}/dora"]))
    with pytest.raises(EngineStartError, match="lora_modules: The adapter's use_dora must be unset"):
        async with AsyncLLM.from_engine_args(args):
            pass
