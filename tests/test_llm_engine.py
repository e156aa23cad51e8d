"""LLMEngine: add, step, abort; every output exactly once, whatever interrupts."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING

import pytest

from helpers_llm import ScriptedLLM, scripted_engine
from trioserve.errors import ClosedError, EngineDeadError, EngineGenerateError, InvalidRequestError
from trioserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trioserve.llm_engine import LLMEngine
    from trioserve.outputs import RequestOutput

DELTA = SamplingParams(output_kind=RequestOutputKind.DELTA)


@pytest.fixture
def pair() -> Iterator[tuple[LLMEngine, ScriptedLLM]]:
    engine, scripted = scripted_engine()
    with engine:
        yield engine, scripted


@pytest.fixture
def engine(pair: tuple[LLMEngine, ScriptedLLM]) -> LLMEngine:
    return pair[0]


def run_to_the_end(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def text_of(outputs: list[RequestOutput], request_id: str) -> str:
    return "".join(output.outputs[0].text for output in outputs if output.request_id == request_id)


def test_step_without_requests_returns_at_once(engine: LLMEngine) -> None:
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_every_output_of_every_request_comes_once(engine: LLMEngine) -> None:
    engine.add_request("a", "one two three", DELTA)
    engine.add_request("b", "four five", DELTA)
    assert engine.get_num_unfinished_requests() == 2
    outputs = run_to_the_end(engine)
    assert text_of(outputs, "a") == " ONE TWO THREE"
    assert text_of(outputs, "b") == " FOUR FIVE"
    assert [output.request_id for output in outputs if output.finished] in (["a", "b"], ["b", "a"])
    assert engine.get_num_unfinished_requests() == 0


def test_params_default_to_the_models_own(pair: tuple[LLMEngine, ScriptedLLM]) -> None:
    engine, scripted = pair
    engine.add_request("a", "hello", priority=3)
    assert scripted.submitted[0].params == SamplingParams(temperature=0.25, top_k=7, max_tokens=99)
    assert scripted.priorities == [3]


def test_a_request_id_is_used_once_at_a_time(engine: LLMEngine) -> None:
    engine.add_request("a", "hello", DELTA)
    with pytest.raises(InvalidRequestError, match="request_id") as caught:
        engine.add_request("a", "world", DELTA)
    assert caught.value.parameter == "request_id"
    assert text_of(run_to_the_end(engine), "a") == " HELLO"
    engine.add_request("a", "again", DELTA)
    assert text_of(run_to_the_end(engine), "a") == " AGAIN"


def test_a_refused_request_leaves_nothing(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="nicer"):
        engine.add_request("a", "refuse")
    with pytest.raises(TypeError, match="prompt"):
        engine.add_request("a", 3.5)  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests()


def test_aborted_requests_are_over(pair: tuple[LLMEngine, ScriptedLLM]) -> None:
    engine, scripted = pair
    for request_id in ("a", "b", "c"):
        engine.add_request(request_id, "forever")
    engine.abort_request("a")
    engine.abort_request(["b", "unknown"])
    assert scripted.aborted == ["a", "b"]
    assert engine.get_num_unfinished_requests() == 1
    engine.abort_request(["c"])
    assert engine.step() == []


def test_an_abort_drops_outputs_not_returned_yet(pair: tuple[LLMEngine, ScriptedLLM]) -> None:
    engine, _ = pair
    engine.add_request("a", "one two three", DELTA)
    engine.step()
    engine.abort_request("a")
    engine.add_request("b", "four", DELTA)
    assert {output.request_id for output in run_to_the_end(engine)} == {"b"}


def test_one_failed_request_hurts_itself_only(engine: LLMEngine) -> None:
    engine.add_request("a", "one two", DELTA)
    engine.add_request("b", "fail", DELTA)
    engine.add_request("c", "three", DELTA)
    outputs, failures = [], 0
    while engine.has_unfinished_requests():
        try:
            outputs += engine.step()
        except EngineGenerateError:
            failures += 1
    assert failures == 1
    assert (text_of(outputs, "a"), text_of(outputs, "c")) == (" ONE TWO", " THREE")


def test_a_dead_engine_ends_all_requests_with_one_error(engine: LLMEngine) -> None:
    for request_id in ("a", "b"):
        engine.add_request(request_id, "forever")
    engine.add_request("c", "die")
    with pytest.raises(EngineDeadError, match="gone"):
        run_to_the_end(engine)
    assert engine.step() == []


def test_chat_rendering_and_prefix_cache(pair: tuple[LLMEngine, ScriptedLLM]) -> None:
    engine, scripted = pair
    messages = [{"role": "user", "content": "hi"}]
    prompt = engine.render_chat(messages, continue_final_message=True, add_generation_prompt=False)
    assert prompt.text == "hi"
    ((seen, options),) = scripted.rendered
    assert seen == messages
    assert (options["continue_final_message"], options["add_generation_prompt"]) == (True, False)
    assert engine.reset_prefix_cache()
    assert engine.tokenizer == "the tokenizer"
    assert engine.model.architecture == "ScriptedForCausalLM"


def test_close_ends_everything_and_says_so(pair: tuple[LLMEngine, ScriptedLLM]) -> None:
    engine, scripted = pair
    engine.add_request("a", "forever")
    engine.close()
    assert scripted.was_closed
    assert engine.closed
    with pytest.raises(ClosedError):
        engine.step()
    with pytest.raises(ClosedError):
        engine.add_request("b", "hello")
    engine.abort_request("a")
    engine.close()


def test_an_engine_that_does_not_start_leaves_no_thread() -> None:
    class BrokenLLM(ScriptedLLM):
        async def __aenter__(self) -> BrokenLLM:
            raise OSError("no engine here")

    from trioserve.llm_engine import LLMEngine

    before = set(threading.enumerate())
    with pytest.raises(OSError, match="no engine here"):
        LLMEngine(BrokenLLM())  # type: ignore[arg-type]
    assert set(threading.enumerate()) == before


def test_a_forgotten_engine_closes_itself_though_requests_run() -> None:
    engine, scripted = scripted_engine()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "trioserve-loop"]
    engine.add_request("a", "forever")
    del engine
    gc.collect()
    thread.join()
    assert scripted.was_closed


def test_ctrl_c_in_step_loses_nothing(pair: tuple[LLMEngine, ScriptedLLM]) -> None:
    engine, scripted = pair
    engine.add_request("a", "interrupt")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.get_num_unfinished_requests() == 1
    assert scripted.aborted == []
    engine.add_request("b", "one two", DELTA)
    outputs: list[RequestOutput] = []
    while not any(output.finished for output in outputs):
        outputs += engine.step()
    assert text_of(outputs, "b") == " ONE TWO"
