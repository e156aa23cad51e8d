"""LLM: results in order, params, failures, Ctrl-C, the progress bar; with a scripted engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from helpers_llm import ScriptedLLM, scripted_llm
from trioserve.beam_search_params import BeamSearchParams
from trioserve.errors import ClosedError, EngineDeadError, EngineGenerateError, InvalidRequestError
from trioserve.llm import LLM
from trioserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trioserve.outputs import RequestOutput


@pytest.fixture
def pair() -> Iterator[tuple[LLM, ScriptedLLM]]:
    llm, scripted = scripted_llm()
    with llm:
        yield llm, scripted


@pytest.fixture
def llm(pair: tuple[LLM, ScriptedLLM]) -> LLM:
    return pair[0]


@pytest.fixture
def scripted(pair: tuple[LLM, ScriptedLLM]) -> ScriptedLLM:
    return pair[1]


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_results_come_in_prompt_order(llm: LLM) -> None:
    """The scripted engine serves the newest first."""
    prompts = [f"prompt {number}" for number in range(20)]
    outputs = llm.generate(prompts, use_tqdm=False)
    assert texts(outputs) == [f" PROMPT {number}" for number in range(20)]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("one", [" ONE"]),
        ([1, 2], [" 1 2"]),
        ({"prompt": "two"}, [" TWO"]),
        ({"prompt_token_ids": [3]}, [" 3"]),
        (["a", [4, 5], {"prompt": "b"}], [" A", " 4 5", " B"]),
        ([], []),
    ],
)
def test_forms_of_prompts(llm: LLM, prompts: Any, expected: list[str]) -> None:
    assert texts(llm.generate(prompts, use_tqdm=False)) == expected


def test_params_default_to_the_models_own(llm: LLM, scripted: ScriptedLLM) -> None:
    own = SamplingParams(temperature=0.25, top_k=7, max_tokens=99)
    assert llm.get_default_sampling_params() == own
    llm.generate("a", use_tqdm=False)
    params = scripted.submitted[0].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 7, 99)


def test_params_and_priorities_per_prompt(llm: LLM, scripted: ScriptedLLM) -> None:
    params = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=6)]
    llm.generate(["a", "b"], params, priority=[2, 1], use_tqdm=False)
    assert [channel.params.max_tokens for channel in scripted.submitted] == [5, 6]
    assert scripted.priorities == [2, 1]


def test_only_final_outputs_are_asked_for_and_the_callers_params_stay(
    llm: LLM, scripted: ScriptedLLM
) -> None:
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    assert texts(llm.generate("one two", params, use_tqdm=False)) == [" ONE TWO"]
    assert scripted.submitted[0].params.output_kind is RequestOutputKind.FINAL_ONLY
    assert params.output_kind is RequestOutputKind.DELTA


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling_params": [SamplingParams()]}, r"prompts \(2\) and params \(1\)"),
        ({"priority": [1, 2, 3]}, r"prompts \(2\) and priorities \(3\)"),
    ],
)
def test_lengths_must_match(llm: LLM, scripted: ScriptedLLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(["a", "b"], use_tqdm=False, **arguments)
    assert scripted.submitted == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling_params": 5}, "params must be a list"),
        ({"sampling_params": [5]}, "sampling_params must be a SamplingParams, got 5"),
        ({"priority": 5}, "priorities must be a list"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(
    llm: LLM, scripted: ScriptedLLM, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, InvalidRequestError), match=message):
        llm.generate(["a"], **arguments)
    with pytest.raises(InvalidRequestError, match="params must be a BeamSearchParams"):
        llm.beam_search("a", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="concurrency_limit must be"):
        llm.beam_search("a", BEAMS, concurrency_limit="2")  # type: ignore[arg-type]


def test_a_failure_while_adding_aborts_those_already_added(llm: LLM, scripted: ScriptedLLM) -> None:
    with pytest.raises(InvalidRequestError, match="nicer"):
        llm.generate(["forever", "forever", "refuse", "never reached"], use_tqdm=False)
    assert len(scripted.aborted) == 2
    assert scripted.open == []
    with pytest.raises(InvalidRequestError, match="nicer"):
        llm.enqueue(["forever", "refuse"])
    assert scripted.open == []
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_a_failed_request_ends_those_of_the_same_call(llm: LLM, scripted: ScriptedLLM) -> None:
    with pytest.raises(EngineGenerateError, match="failed"):
        llm.generate(["forever", "fail"], use_tqdm=False)
    assert scripted.open == []
    assert texts(llm.generate("again", use_tqdm=False)) == [" AGAIN"]


def test_a_dead_engine_is_reported(llm: LLM) -> None:
    with pytest.raises(EngineDeadError, match="gone"):
        llm.generate(["forever", "die"], use_tqdm=False)


def test_enqueue_then_wait(llm: LLM) -> None:
    first = llm.enqueue(["a", "b"])
    second = llm.enqueue("c", SamplingParams(max_tokens=5))
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert texts(outputs) == [" A", " B", " C"]
    assert [output.request_id for output in outputs] == first + second
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_generate_returns_its_own_results_only(llm: LLM) -> None:
    llm.enqueue(["a", "b"])
    assert texts(llm.generate("c", use_tqdm=False)) == [" C"]
    assert texts(llm.wait_for_completion(use_tqdm=False)) == [" A", " B"]


def test_chat(llm: LLM, scripted: ScriptedLLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    assert texts(llm.chat(conversation, use_tqdm=False)) == [" HI"]
    other = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]
    outputs = llm.chat(
        [conversation, other],
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
        tools=[{"type": "function"}],
        chat_template_kwargs={"thinking": True},
    )
    assert texts(outputs) == [" HI", " YOU"]
    assert scripted.rendered[-1] == (
        other,
        {
            "add_generation_prompt": False,
            "continue_final_message": True,
            "tools": [{"type": "function"}],
            "template_kwargs": {"thinking": True},
        },
    )


def test_enqueue_chat(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("one", "two")]
    ids = llm.enqueue_chat(conversations)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert texts(outputs) == [" ONE", " TWO"]


class RecordedBar:
    def __init__(self, **options: Any) -> None:
        self.options = options
        self.count = 0
        self.postfix = options["postfix"]
        self.was_closed = False

    def update(self, n: int) -> None:
        self.count += n

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.postfix = text

    def close(self) -> None:
        self.was_closed = True


def test_a_callable_takes_the_place_of_tqdm(llm: LLM) -> None:
    bars: list[RecordedBar] = []

    def make_bar(**options: Any) -> RecordedBar:
        bars.append(RecordedBar(**options))
        return bars[-1]

    llm.generate(["a", "b c"], [SamplingParams(n=3), SamplingParams()], use_tqdm=make_bar)
    (bar,) = bars
    assert (bar.options["desc"], bar.options["total"]) == ("Processed prompts", 4)
    assert (bar.count, bar.was_closed) == (4, True)
    assert bar.postfix.startswith("est. speed input: ")
    assert " toks/s, output: " in bar.postfix


def test_the_bar_is_closed_when_generate_raises(llm: LLM) -> None:
    bars: list[RecordedBar] = []

    def make_bar(**options: Any) -> RecordedBar:
        bars.append(RecordedBar(**options))
        return bars[-1]

    with pytest.raises(EngineGenerateError):
        llm.generate("fail", use_tqdm=make_bar)
    assert bars[0].was_closed


def test_the_bar_is_shown_by_default_and_leaves_no_thread(llm: LLM, capfd: Any) -> None:
    before = set(threading.enumerate())
    llm.generate(["a", "b"])
    assert set(threading.enumerate()) == before
    shown = capfd.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "est. speed input:" in shown
    llm.generate(["a", "b"], use_tqdm=False)
    assert capfd.readouterr().err == ""


def test_the_rest(llm: LLM) -> None:
    assert llm.get_tokenizer() == "the tokenizer"
    assert llm.reset_prefix_cache()
    assert repr(llm) == "<LLM 'scripted': ScriptedForCausalLM, float32, max_model_len 1024>"


def test_use_after_close(llm: LLM, scripted: ScriptedLLM) -> None:
    llm.close()
    assert scripted.was_closed
    assert repr(llm).endswith("closed>")
    with pytest.raises(ClosedError):
        llm.generate("a", use_tqdm=False)
    llm.close()


def test_arguments_are_checked_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="unknown argument 'max_model_length'"):
        LLM(model="scripted", max_model_length=5)
    with (
        pytest.raises(ValueError, match="max_model_len must be"),
        pytest.warns(DeprecationWarning, match="swap_space") as warned,
    ):
        LLM(model="scripted", max_model_len="x", swap_space=4)
    assert warned[0].filename == __file__


def test_from_a_thread_and_inside_asyncio(llm: LLM) -> None:
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.extend(texts(llm.generate("one", use_tqdm=False))))
    thread.start()
    thread.join()

    async def main() -> None:
        answers.extend(texts(llm.generate("two", use_tqdm=False)))

    asyncio.run(main())
    assert answers == [" ONE", " TWO"]


def test_ctrl_c_ends_the_calls_requests_and_leaves_the_llm_usable(llm: LLM, scripted: ScriptedLLM) -> None:
    enqueued = llm.enqueue("hello")
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["forever", "interrupt"], use_tqdm=False)
    assert len(scripted.aborted) == 2
    assert scripted.open == []
    assert texts(llm.generate(["a", "b"], use_tqdm=False)) == [" A", " B"]
    assert [output.request_id for output in llm.wait_for_completion(use_tqdm=False)] == enqueued


def test_ctrl_c_while_waiting_for_enqueued_requests(llm: LLM, scripted: ScriptedLLM) -> None:
    llm.enqueue(["forever", "interrupt"])
    with pytest.raises(KeyboardInterrupt):
        llm.wait_for_completion(use_tqdm=False)
    assert scripted.open == []
    assert llm.wait_for_completion(use_tqdm=False) == []


SURROUNDINGS = {
    "plain": "interrupted_generate()",
    "asyncio.run": "asyncio.run(as_coroutine())",
    "a running loop with Python's own handler, as in Jupyter": """
        loop = asyncio.new_event_loop()
        loop.run_until_complete(as_coroutine())
        loop.close()
        """,
}


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_ctrl_c_in_a_script_that_never_closes(surrounding: str) -> None:
    script = textwrap.dedent("""
        import asyncio
        from helpers_llm import scripted_llm

        llm, scripted = scripted_llm()

        def interrupted_generate():
            try:
                llm.generate(["forever", "interrupt"])
            except KeyboardInterrupt:
                print("interrupted", scripted.aborted, scripted.open)
            print(llm.generate("hello", use_tqdm=False)[0].outputs[0].text)

        async def as_coroutine():
            interrupted_generate()
        """) + textwrap.dedent(SURROUNDINGS[surrounding])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["interrupted ['0', '1'] []", " HELLO", ""]


# Beam search

BEAMS = BeamSearchParams(beam_width=4, max_tokens=3)


def test_searches_give_their_results_in_prompt_order(llm: LLM) -> None:
    outputs = llm.beam_search(["long prompt", "short", "x"], BEAMS)
    assert [output.sequences[0].text for output in outputs] == ["LONG PROMPT", "SHORT", "X"]
    (output,) = llm.beam_search("one", BEAMS)
    assert output.prompt == "one"
    assert llm.beam_search([], BEAMS) == []


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (3, 3), (None, 32)])
def test_so_many_searches_run_at_a_time(
    llm: LLM, scripted: ScriptedLLM, limit: int | None, expected: int
) -> None:
    # By default as many as fill the engine with their beams, four each.
    assert llm._engine.config.scheduler.max_num_seqs == 128
    llm.beam_search(["prompt"] * 40, BEAMS, concurrency_limit=limit)
    assert scripted.most_searching == expected


def test_a_failing_search_ends_all(llm: LLM, scripted: ScriptedLLM) -> None:
    with pytest.raises(EngineGenerateError, match="the search failed"):
        llm.beam_search(["slow", "fail", "fail"], BEAMS)
    assert scripted.searching == 0


def test_a_search_has_at_least_one_prompt_at_a_time(llm: LLM) -> None:
    with pytest.raises(ValueError, match="concurrency_limit"):
        llm.beam_search("x", BEAMS, concurrency_limit=0)


def test_the_bar_counts_searches(llm: LLM) -> None:
    bars: list[RecordedBar] = []

    def make_bar(**options: Any) -> RecordedBar:
        bars.append(RecordedBar(**options))
        return bars[-1]

    llm.beam_search(["a", "b", "c"], BEAMS, use_tqdm=make_bar)
    (bar,) = bars
    assert (bar.options["total"], bar.count, bar.was_closed) == (3, 3, True)
