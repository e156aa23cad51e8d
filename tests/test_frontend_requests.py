"""What a request asks of the engine, and what of the engine's answers it shows: with a scripted core."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import wait_all_tasks_blocked

from byte_tokenizer import EOS
from fake_engine import FakeEngine, open_fake_llm
from trioserve import BeamSearchParams, FlatLogprobs, RequestOutputKind, SamplingParams
from trioserve.errors import InvalidRequestError
from trioserve.frontend.prompts import TextPrompt, TokensPrompt
from trioserve.frontend.streaming_input import StreamingInput
from trioserve.outputs import FinishReason
from trioserve.token_constraints import ThinkingBudget
from trioserve.worker.batch import LogprobRow, SampledToken

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from trio.testing import MockClock

    from trioserve.outputs import TokenLogprobs

DELTA = RequestOutputKind.DELTA
CUMULATIVE = RequestOutputKind.CUMULATIVE
FINAL_ONLY = RequestOutputKind.FINAL_ONLY


def row(token_id: int, *others: int) -> LogprobRow:
    """-0.5 for the token that is there, falling logprobs for the others."""
    logprobs = [-0.5, *(-0.25 * (place + 1) for place in range(len(others)))]
    return LogprobRow((token_id, *others), logprobs, (2, *range(1, len(others) + 1)))


def values_of(position: TokenLogprobs | None) -> list[tuple[int, float, int, str]] | None:
    if position is None:
        return None
    return [(token, p.logprob, p.rank, p.decoded_token) for token, p in position.items()]


def success_counts(fake: FakeEngine) -> dict[str, float]:
    return {
        sample.labels["finished_reason"]: sample.value
        for family in text_string_to_metric_families(fake.llm.metrics.render().decode())
        for sample in family.samples
        if sample.name == "trioserve:request_success_total"
    }


# Logprobs

PROMPT_ROWS = [row(98, 120), row(99, 99)]
SHOWN = [
    None,
    [(98, -0.5, 2, "b"), (120, -0.25, 1, "x")],
    [(99, -0.5, 2, "c")],
]


async def test_prompt_logprobs_come_in_parts_and_show_when_they_are_whole(fake: FakeEngine) -> None:
    params = SamplingParams(prompt_logprobs=1, output_kind=CUMULATIVE)
    async with fake.llm.stream("abc", params) as outputs:
        (add,) = fake.client.added
        assert not add.params.reads_prefix_cache
        fake.client.emit(add, prompt_logprobs=PROMPT_ROWS[:1])
        fake.client.emit(add, "y", prompt_logprobs=PROMPT_ROWS[1:])
        for finish in (None, FinishReason.LENGTH):
            output = await anext(outputs)
            assert output.prompt_logprobs is not None
            assert [values_of(position) for position in output.prompt_logprobs] == SHOWN
            if finish is None:
                fake.client.emit(add, "z", FinishReason.LENGTH)


async def test_a_delta_stream_has_prompt_logprobs_once(fake: FakeEngine) -> None:
    async with fake.llm.stream("abc", SamplingParams(prompt_logprobs=1, output_kind=DELTA)) as outputs:
        (add,) = fake.client.added
        fake.client.emit(add, "y", prompt_logprobs=PROMPT_ROWS)
        first = await anext(outputs)
        fake.client.emit(add, "z", FinishReason.LENGTH)
        second = await anext(outputs)
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 3
    assert second.prompt_logprobs is None


async def test_one_of_n_completions_reports_the_prompts_logprobs(fake: FakeEngine) -> None:
    async with fake.llm.stream("abc", SamplingParams(n=3, prompt_logprobs=1)) as outputs:
        assert [add.params.prompt_logprobs for add in fake.client.added] == [1, None, None]
        fake.client.emit(fake.client.added[0], "y", prompt_logprobs=PROMPT_ROWS)
        assert (await anext(outputs)).prompt_logprobs is not None


async def test_the_prompts_only_token_has_no_logprob(fake: FakeEngine) -> None:
    async with fake.llm.stream("a", SamplingParams(prompt_logprobs=1)) as outputs:
        fake.client.emit(fake.client.added[0], "y")
        assert (await anext(outputs)).prompt_logprobs == [None]


@pytest.mark.parametrize("params", [{"logprobs": 1}, {"logprob_token_ids": [100]}])
async def test_the_tokens_asked_for_by_id_come_last(fake: FakeEngine, params: dict[str, Any]) -> None:
    async with fake.llm.stream("a", SamplingParams(**params)) as outputs:
        fake.client.emit(fake.client.added[0], [SampledToken(97, row(97, 98, 100))])
        completion = (await anext(outputs)).outputs[0]
    assert completion.logprobs is not None
    assert [list(position) for position in completion.logprobs] == [[97, 98, 100]]
    assert completion.cumulative_logprob == -0.5


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_flat_logprobs_show_what_others_do(fake: FakeEngine, kind: RequestOutputKind) -> None:
    tokens = [SampledToken(97, row(97, 98, 97)), SampledToken(99, row(99)), SampledToken(97, row(97, 97))]
    shown: list[list[Any]] = []
    for flat in (False, True):
        params = SamplingParams(logprobs=2, prompt_logprobs=1, flat_logprobs=flat, output_kind=kind)
        async with fake.llm.stream("abc", params) as outputs:
            fake.client.emit(fake.client.added[-1], tokens, FinishReason.LENGTH, prompt_logprobs=PROMPT_ROWS)
            output = await anext(outputs)
        generated, prompt = output.outputs[0].logprobs, output.prompt_logprobs
        assert generated is not None
        assert prompt is not None
        assert isinstance(generated, FlatLogprobs) is flat
        assert isinstance(prompt, FlatLogprobs) is flat
        shown.append([[values_of(position) for position in logprobs] for logprobs in (generated, prompt)])
        shown[-1][1][0] = None  # {} where it is flat: nothing comes before the first token
    assert shown[0] == shown[1]


def test_flat_logprobs_are_a_sequence() -> None:
    flat = FlatLogprobs()
    for token in range(5):
        flat.append([token, 9], [-1.0, -2.0], [2, 1])
        flat.decoded_tokens += [str(token), "9"]
    assert len(flat) == 5
    assert list(flat[-1]) == [4, 9]
    assert [list(position) for position in flat[1:4:2]] == [[1, 9], [3, 9]]
    assert list(flat[1:3].token_ids) == [1, 9, 2, 9]
    with pytest.raises(IndexError):
        flat[5]


# Ends


@pytest.mark.parametrize(
    ("reason", "stop_reason"),
    [(FinishReason.REPETITION, "repetition_detected"), (FinishReason.DEADLINE, None)],
)
async def test_why_the_engine_ended_it(
    fake: FakeEngine, reason: FinishReason, stop_reason: str | None
) -> None:
    async with fake.llm.stream("a") as outputs:
        fake.client.emit(fake.client.added[0], "lalala", reason)
        output = await anext(outputs)
    completion = output.outputs[0]
    assert output.finished
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        "lalala",
        reason,
        stop_reason,
    )
    assert success_counts(fake)[str(reason)] == 1


async def test_a_refusal_is_the_requests_own_error(fake: FakeEngine) -> None:
    async with fake.llm.stream("a") as refused, fake.llm.stream("b") as sound:
        first, second = fake.client.added
        fake.client.refuse(first, "structured_outputs must be nicer.", "structured_outputs")
        with pytest.raises(InvalidRequestError, match="nicer") as caught:
            await anext(refused)
        assert caught.value.parameter == "structured_outputs"
        with pytest.raises(StopAsyncIteration):
            await anext(refused)
        fake.client.emit(second, "x", FinishReason.LENGTH)
        assert (await anext(sound)).finished
    assert fake.client.aborted == []
    assert sum(success_counts(fake).values()) == 1


async def test_a_refusal_of_one_completion_is_that_of_all(fake: FakeEngine) -> None:
    """The engine refuses each for the same reason; the consumer hears it once, the rest is aborted."""
    async with fake.llm.stream("a", SamplingParams(n=3, output_kind=DELTA)) as outputs:
        first, second, third = fake.client.added
        fake.client.refuse(second, "no", "structured_outputs")
        fake.client.refuse(first, "no", "structured_outputs")
        await wait_all_tasks_blocked()
        assert sorted(fake.client.aborted) == [first.request_id, third.request_id]
        with pytest.raises(InvalidRequestError):
            await anext(outputs)
    assert len(fake.client.aborted) == 2
    assert sum(success_counts(fake).values()) == 0


# Deadlines


async def test_a_request_inherits_the_deadline_of_its_scopes(
    fake: FakeEngine, autojump_clock: MockClock
) -> None:
    async with fake.llm.stream("a"):
        pass
    with trio.fail_after(10), trio.move_on_after(20):
        await trio.sleep(2.5)
        async with fake.llm.stream("a", SamplingParams(n=2)):
            pass
    with trio.move_on_after(0):
        channel = await fake.llm.submit("a")
        fake.llm.release(channel)
    assert [add.time_left for add in fake.client.added] == [None, 7.5, 7.5, 0.0]


# What is checked, and what is tokenized


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        ({"allowed_token_ids": [3, 257]}, "allowed_token_ids"),
        ({"logprob_token_ids": [257]}, "logprob_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)
async def test_what_this_engine_cannot_do_is_refused_at_once(
    fake: FakeEngine, params: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(InvalidRequestError, match=parameter) as caught:
        await fake.llm.complete("a", SamplingParams(**params))
    assert caught.value.parameter == parameter
    assert fake.client.added == []


@pytest.mark.parametrize("logprobs", [20, 257, -1])
async def test_an_engine_without_a_limit_gives_all_logprobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logprobs: int
) -> None:
    async with open_fake_llm(tmp_path, monkeypatch, max_logprobs=-1) as fake:
        async with fake.llm.stream("a", SamplingParams(logprobs=logprobs)):
            assert fake.client.added[0].params.logprobs == logprobs
        with pytest.raises(InvalidRequestError, match="logprobs"):
            await fake.llm.complete("a", SamplingParams(logprobs=258))


@pytest.mark.parametrize(
    ("bad_words", "expected"),
    [
        ([], []),
        (["ab"], [b"ab", b" ab"]),
        ([" ab", "ab"], [b"ab", b" ab"]),
        (["\n"], [b"\n"]),
        (["é" * 3000], [("é" * 3000).encode(), (" " + "é" * 3000).encode()]),
    ],
)
async def test_bad_words_are_barred_with_and_without_a_space_before_them(
    fake: FakeEngine, bad_words: Sequence[str], expected: list[bytes]
) -> None:
    async with fake.llm.stream("a", SamplingParams(bad_words=bad_words)):
        constraints = fake.client.added[0].constraints
    assert [bytes(word) for word in constraints.bad_words] == expected
    assert constraints.thinking is None


async def test_a_thinking_budget_knows_how_the_model_thinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasoning = {"start": "<t>", "end": "</t>"}
    params = SamplingParams(thinking_token_budget=3)
    async with (
        open_fake_llm(tmp_path, monkeypatch, reasoning_config=reasoning) as fake,
        fake.llm.stream("a", params),
    ):
        thinking = fake.client.added[0].constraints.thinking
    assert thinking == ThinkingBudget(
        max_tokens=3, start_token_ids=tuple(b"<t>"), end_token_ids=tuple(b"</t>")
    )


@pytest.mark.parametrize(
    ("prompt", "option", "expected"),
    [
        ({"prompt": "a", "cache_salt": "mine"}, None, "mine"),
        ({"prompt_token_ids": [1], "cache_salt": "mine"}, None, "mine"),
        ({"prompt": "a", "cache_salt": "mine"}, "other", "other"),
        ({"prompt": "a"}, "other", "other"),
        ("a", None, None),
    ],
)
async def test_a_prompt_may_bring_its_own_salt(
    fake: FakeEngine, prompt: Any, option: str | None, expected: str | None
) -> None:
    async with fake.llm.stream(prompt, cache_salt=option):
        assert fake.client.added[0].cache_salt == expected


async def test_a_prompts_salt_is_checked_like_any_other(fake: FakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        await fake.llm.complete({"prompt": "a", "cache_salt": 3})
    assert fake.llm.num_open_requests == 0


async def test_several_tokens_of_a_step_end_where_a_stop_string_does(fake: FakeEngine) -> None:
    tokens = [SampledToken(byte, row(byte)) for byte in b"abENDcd"]
    async with fake.llm.stream("x", SamplingParams(stop="END", logprobs=0)) as outputs:
        fake.client.emit(fake.client.added[0], [*tokens, SampledToken(EOS, row(EOS))], FinishReason.STOP)
        completion = (await anext(outputs)).outputs[0]
    assert completion.text == "ab"
    assert completion.token_ids == list(b"abEND")
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 5
    assert completion.cumulative_logprob is not None
    assert math.isclose(completion.cumulative_logprob, -2.5)


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
async def test_what_one_completion_computes_was_not_cached_for_another(
    fake: FakeEngine, kind: RequestOutputKind
) -> None:
    async with fake.llm.stream("abc", SamplingParams(n=2, output_kind=kind)) as outputs:
        first, second = fake.client.added
        ends = [(add, "x", FinishReason.LENGTH, None) for add in (first, second)]
        fake.client.emit_step(ends, num_cached_tokens=[1, 2])
        assert (await anext(outputs)).num_cached_tokens == 1


# Arguments of a wrong type

BEAMS = BeamSearchParams(beam_width=2, max_tokens=2)


async def no_pieces() -> AsyncIterator[str]:
    for piece in ():
        yield piece


async def enter_stream(fake: FakeEngine, prompt: Any, **arguments: Any) -> None:
    async with fake.llm.stream(prompt, **arguments):
        pass


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.complete("a", 5), "params must be a SamplingParams, got 5."),
        (lambda llm: llm.complete("a", 0), "params must be a SamplingParams, got 0."),
        (lambda llm: anext(llm.generate("a", "x")), "params must be a SamplingParams, got 'x'."),
        (lambda llm: llm.submit("a", {}), "params must be a SamplingParams, got {}."),
        (lambda llm: llm.beam_search("a", 5), "params must be a BeamSearchParams, got 5."),
        (lambda llm: llm.complete("a", request_id=5), "request_id must be a string, got 5."),
        (lambda llm: llm.beam_search("a", BEAMS, request_id=5), "request_id must be a string, got 5."),
        (lambda llm: llm.complete(TextPrompt(5)), "text must be a string, got 5."),
        (lambda llm: llm.complete(TextPrompt("a", 5)), "add_special_tokens must be true or false, got 5."),
        (lambda llm: llm.complete({"prompt": 5}), "text must be a string, got 5."),
        (lambda llm: llm.complete(TokensPrompt(5)), "prompt token ids must be a list of integers, got 5."),
        (lambda llm: llm.complete(TokensPrompt([1], 5)), "text must be a string, got 5."),
        (
            lambda llm: llm.complete([10**5000]),
            "token ids must be below the vocabulary's size of 257, got a value of type int.",
        ),
    ],
)
async def test_an_argument_of_a_wrong_type_is_named(
    fake: FakeEngine, call: Callable[[Any], Awaitable[object]], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await call(fake.llm)
    assert str(caught.value) == message
    assert fake.client.added == []


async def test_so_is_one_of_a_stream(fake: FakeEngine) -> None:
    for prompt in ("a", no_pieces()):
        with pytest.raises(InvalidRequestError, match="params must be a SamplingParams, got 5"):
            await enter_stream(fake, prompt, params=5)
        with pytest.raises(InvalidRequestError, match="request_id must be a string, got 5"):
            await enter_stream(fake, prompt, request_id=5)
    with pytest.raises(InvalidRequestError, match="sampling_params must be null or a SamplingParams, got 5"):
        StreamingInput("x", 5)  # type: ignore[arg-type]
    for names in (5, [5]):
        with pytest.raises(InvalidRequestError, match="request_id must be a string or several"):
            fake.llm.abort(names)  # type: ignore[arg-type]


async def test_token_ids_may_come_from_any_iterable(fake: FakeEngine) -> None:
    async with fake.llm.stream(TokensPrompt(iter([97, 98]))):  # type: ignore[arg-type]
        assert fake.client.added[0].prompt_token_ids == bytes([97, 0, 0, 0, 98, 0, 0, 0])


async def test_too_many_token_ids_are_not_looked_at(fake: FakeEngine) -> None:
    class Unread(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("nobody needs to know what they are")

    with pytest.raises(InvalidRequestError, match="the prompt has 128 tokens"):
        await fake.llm.complete(Unread([97] * 128))
