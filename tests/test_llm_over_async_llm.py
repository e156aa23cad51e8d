"""LLM and LLMEngine over the real AsyncLLM, with an engine core that echoes the prompt."""

from __future__ import annotations

from array import array
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import pytest
import trio

from fake_engine import FakeEngine, open_fake_llm
from helpers_llm import interrupt_the_call_that_waits
from trioserve.errors import ClosedError, EngineDeadError, InvalidRequestError
from trioserve.llm import LLM
from trioserve.llm_engine import LLMEngine
from trioserve.outputs import FinishReason
from trioserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from trioserve.async_llm import AsyncLLM
    from trioserve.link.messages import Add


class Echo:
    """Answers each request, in two steps, with its prompt; "forever" with nothing, "die" with its death."""

    def __init__(self, engine: FakeEngine) -> None:
        self.client = engine.client
        self._add = engine.client.add
        engine.client.add = self.add  # type: ignore[method-assign]

    def add(self, request: Add) -> None:
        self._add(request)
        text = bytes(array("i", request.prompt_token_ids).tolist()).decode()
        match text:
            case "forever":
                pass
            case "interrupt":
                trio.lowlevel.spawn_system_task(interrupt_the_call_that_waits)
            case "die":
                self.client.die()
            case "refuse":
                self.client.refuse(request, "no such grammar", "structured_outputs")
            case _:
                half = len(text) // 2
                self.client.emit(request, text[:half])
                self.client.emit(request, text[half:], FinishReason.LENGTH)


@pytest.fixture
def echoes() -> list[Echo]:
    return []


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, echoes: list[Echo]) -> Iterator[LLMEngine]:
    @asynccontextmanager
    async def open_llm() -> AsyncIterator[AsyncLLM]:
        async with open_fake_llm(tmp_path, monkeypatch) as fake:
            echoes.append(Echo(fake))
            yield fake.llm

    with LLMEngine(cast("AsyncLLM", open_llm())) as engine:
        yield engine


@pytest.fixture
def llm(engine: LLMEngine) -> LLM:
    return LLM.from_engine(engine)


def test_many_prompts_in_order(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(50)]
    outputs = llm.generate(prompts, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == prompts
    assert [output.prompt for output in outputs] == prompts


def test_several_completions_of_one_prompt(llm: LLM) -> None:
    (output,) = llm.generate("hello", SamplingParams(n=3), use_tqdm=False)
    assert [(completion.index, completion.text) for completion in output.outputs] == [
        (0, "hello"),
        (1, "hello"),
        (2, "hello"),
    ]


def test_chat_goes_through_the_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
    assert output.outputs[0].text == "<user>hi\n<assistant>"


def test_deltas_add_up(engine: LLMEngine) -> None:
    for name in ("a", "b"):
        engine.add_request(name, f"text of {name}", SamplingParams(output_kind=RequestOutputKind.DELTA))
    texts = {"a": "", "b": ""}
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[output.request_id] += output.outputs[0].text
    assert texts == {"a": "text of a", "b": "text of b"}


def test_a_failure_while_adding_reaches_the_engine(llm: LLM, echoes: list[Echo]) -> None:
    with pytest.raises(InvalidRequestError, match="context length"):
        llm.generate(["forever", "x" * 200], use_tqdm=False)
    assert len(echoes[0].client.aborted) == 1


def test_ctrl_c_reaches_the_engine(llm: LLM, echoes: list[Echo]) -> None:
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["forever", "interrupt"], use_tqdm=False)
    client = echoes[0].client
    assert sorted(client.aborted) == [add.request_id for add in client.added]
    assert llm.generate("again", use_tqdm=False)[0].outputs[0].text == "again"


def test_a_dead_engine(llm: LLM) -> None:
    with pytest.raises(EngineDeadError, match="killed by the test"):
        llm.generate(["forever", "die"], use_tqdm=False)
    with pytest.raises(EngineDeadError, match="killed by the test"):
        llm.generate("more", use_tqdm=False)
    llm.close()
    with pytest.raises(ClosedError):
        llm.generate("more", use_tqdm=False)


def test_close_while_requests_run(engine: LLMEngine, echoes: list[Echo]) -> None:
    engine.add_request("a", "forever")
    engine.abort_request("a")
    assert len(echoes[0].client.aborted) == 1
    assert engine.reset_prefix_cache()
    assert echoes[0].client.calls == [("reset_prefix_cache", False)]


def test_the_engine_is_steered_through_the_portal(llm: LLM, echoes: list[Echo]) -> None:
    client = echoes[0].client
    assert llm.reset_prefix_cache(reset_running_requests=True)
    llm.pause_generation("keep", clear_cache=False)
    assert llm.is_paused()
    llm.resume_generation()
    llm.sleep(2, "wait")
    assert llm.is_sleeping()
    llm.wake_up(["weights"])
    llm.wait_for_requests_to_drain()
    assert client.calls == [
        ("reset_prefix_cache", True),
        ("pause", "keep", False),
        ("is_paused",),
        ("resume",),
        ("sleep", 2, "wait"),
        ("is_sleeping",),
        ("wake_up", ["weights"]),
        ("drain",),
    ]
    with pytest.raises(InvalidRequestError, match="mode"):
        llm.sleep(mode="later")  # type: ignore[arg-type]


def test_pausing_ends_what_was_enqueued(llm: LLM) -> None:
    llm.enqueue(["forever", "forever"])
    llm.pause_generation()
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == [FinishReason.ABORT] * 2


def test_prompts_may_bring_their_salts(llm: LLM, echoes: list[Echo]) -> None:
    prompts = [{"prompt": "a", "cache_salt": "mine"}, {"prompt": "b"}]
    outputs = llm.generate(prompts, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["a", "b"]
    assert {add.cache_salt for add in echoes[0].client.added} == {"mine", None}


def test_a_refusal_of_the_engine_ends_the_call(llm: LLM, echoes: list[Echo]) -> None:
    client = echoes[0].client
    with pytest.raises(InvalidRequestError, match="no such grammar"):
        llm.generate(["forever", "refuse"], use_tqdm=False)
    assert client.aborted == [client.added[0].request_id]


def test_pieces_of_a_prompt_need_an_async_caller(llm: LLM) -> None:
    async def pieces() -> AsyncIterator[str]:
        yield "a"

    with pytest.raises(TypeError, match="prompt"):
        llm.generate([pieces()], use_tqdm=False)  # type: ignore[list-item]
