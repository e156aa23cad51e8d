"""AsyncLLM over a scripted engine core: scopes, channels, output kinds, failures."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from byte_tokenizer import EOS
from fake_engine import FakeEngine, open_fake_llm
from trioserve import RequestOutputKind, SamplingParams, TokensPrompt
from trioserve.errors import ClosedError, EngineDeadError, InvalidRequestError, OverloadedError
from trioserve.frontend.requests import SubmittedRequest
from trioserve.outputs import FinishReason
from trioserve.worker.batch import LogprobRow, SampledToken

if TYPE_CHECKING:
    from pathlib import Path

    from trioserve.async_llm import AsyncLLM
    from trioserve.link.messages import Add
    from trioserve.outputs import RequestOutput

DELTA = RequestOutputKind.DELTA
CUMULATIVE = RequestOutputKind.CUMULATIVE
FINAL_ONLY = RequestOutputKind.FINAL_ONLY


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


async def test_a_request_reaches_the_engine_as_token_ids(fake: FakeEngine) -> None:
    async with fake.llm.stream("hé", SamplingParams(seed=3)):
        (add,) = fake.client.added
    assert array("i", add.prompt_token_ids).tolist() == list("hé".encode())
    assert add.params.max_tokens == 16
    assert add.seed == 3


async def test_max_tokens_none_fills_the_context(fake: FakeEngine) -> None:
    async with fake.llm.stream("0123456789", SamplingParams(max_tokens=None)):
        assert fake.client.added[0].params.max_tokens == 118


async def test_a_delta_stream_gives_what_is_new(fake: FakeEngine) -> None:
    async with fake.llm.stream("x", SamplingParams(output_kind=DELTA)) as outputs:
        (add,) = fake.client.added
        fake.client.emit(add, "ab")
        assert text_of(await anext(outputs)) == "ab"
        fake.client.emit(add, "c", FinishReason.LENGTH)
        last = await anext(outputs)
        assert text_of(last) == "c"
        assert last.finished
        assert last.outputs[0].finish_reason is FinishReason.LENGTH
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)
    assert fake.client.aborted == []


async def test_a_cumulative_stream_gives_everything_so_far(fake: FakeEngine) -> None:
    async with fake.llm.stream("x", SamplingParams(output_kind=CUMULATIVE)) as outputs:
        (add,) = fake.client.added
        fake.client.emit(add, "ab")
        assert text_of(await anext(outputs)) == "ab"
        fake.client.emit(add, "c", FinishReason.LENGTH)
        last = await anext(outputs)
    assert text_of(last) == "abc"
    assert last.outputs[0].token_ids == list(b"abc")


async def test_a_final_only_request_asks_the_engine_for_nothing_before_the_end(fake: FakeEngine) -> None:
    async with trio.open_nursery() as nursery:

        async def consume() -> None:
            assert text_of(await fake.llm.complete("x")) == "abc"

        nursery.start_soon(consume)
        await wait_all_tasks_blocked()
        (add,) = fake.client.added
        assert not add.streams
        fake.client.emit(add, "abc", FinishReason.LENGTH)


async def test_a_slow_consumer_gets_one_merged_output(fake: FakeEngine) -> None:
    async with fake.llm.stream("x", SamplingParams(output_kind=DELTA)) as outputs:
        (add,) = fake.client.added
        for character in "abcd":
            fake.client.emit(add, character)
        await wait_all_tasks_blocked()
        output = await anext(outputs)
    assert text_of(output) == "abcd"
    assert output.outputs[0].token_ids == list(b"abcd")


@pytest.mark.parametrize("leave", ["break", "raise", "cancel"])
async def test_leaving_the_scope_aborts(fake: FakeEngine, leave: str) -> None:
    with trio.CancelScope() as scope:
        try:
            async with fake.llm.stream("x") as outputs:
                (add,) = fake.client.added
                fake.client.emit(add, "a")
                async for _ in outputs:
                    if leave == "raise":
                        raise KeyError
                    if leave == "cancel":
                        scope.cancel()
                        await trio.sleep_forever()
                    break
        except KeyError:
            assert leave == "raise"
    assert fake.client.aborted == [add.request_id]
    assert fake.llm.num_open_requests == 0


async def test_a_cancelled_complete_aborts(fake: FakeEngine) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fake.llm.complete, "x")
            await wait_all_tasks_blocked()
            scope.cancel()
    assert fake.client.aborted == [fake.client.added[0].request_id]


async def test_closing_the_generator_aborts(fake: FakeEngine) -> None:
    generator = fake.llm.generate("x")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(anext, generator)
        await wait_all_tasks_blocked()
        (add,) = fake.client.added
        fake.client.emit(add, "a")
    await generator.aclose()
    assert fake.client.aborted == [add.request_id]


async def test_a_finished_request_is_not_aborted(fake: FakeEngine) -> None:
    async with fake.llm.stream("x") as outputs:
        fake.client.emit(fake.client.added[0], "a", FinishReason.STOP)
        await anext(outputs)
    assert fake.client.aborted == []


async def test_a_stop_string_ends_the_request_and_the_engines_work(fake: FakeEngine) -> None:
    async with fake.llm.stream("x", SamplingParams(stop="END", output_kind=DELTA)) as outputs:
        (add,) = fake.client.added
        fake.client.emit(add, "abEN")
        assert text_of(await anext(outputs)) == "ab"
        fake.client.emit(add, "Dcd")
        last = await anext(outputs)
    assert last.finished
    assert text_of(last) == ""
    assert last.outputs[0].finish_reason is FinishReason.STOP
    assert last.outputs[0].stop_reason == "END"
    assert fake.client.aborted == [add.request_id]


async def test_text_held_back_for_a_stop_string_is_flushed_at_the_end(fake: FakeEngine) -> None:
    async with fake.llm.stream("x", SamplingParams(stop="END")) as outputs:
        fake.client.emit(fake.client.added[0], "abEN", FinishReason.LENGTH)
        assert text_of(await anext(outputs)) == "abEN"


async def test_the_text_of_a_stop_token_is_not_shown(fake: FakeEngine) -> None:
    async with fake.llm.stream("x", SamplingParams(stop_token_ids=[ord("!")])) as outputs:
        fake.client.emit(fake.client.added[0], "hi!", FinishReason.STOP, stop_token_id=ord("!"))
        output = await anext(outputs)
    assert text_of(output) == "hi"
    assert output.outputs[0].stop_reason == ord("!")


async def test_min_tokens_holds_stop_strings_off(fake: FakeEngine) -> None:
    async with fake.llm.stream("x", SamplingParams(stop="a", min_tokens=2)) as outputs:
        fake.client.emit(fake.client.added[0], "aaba")
        output = await anext(outputs)
    assert text_of(output) == "aab"


async def test_n_completions_share_a_channel_and_end_one_by_one(fake: FakeEngine) -> None:
    async with fake.llm.stream("x", SamplingParams(n=2, seed=7, output_kind=DELTA)) as outputs:
        first, second = fake.client.added
        assert (first.seed, second.seed) == (7, 8)
        assert first.params.n == second.params.n == 1
        fake.client.emit_step([(first, "a", FinishReason.LENGTH, None), (second, "b", None, None)])
        output = await anext(outputs)
        assert [(c.index, c.text) for c in output.outputs] == [(0, "a"), (1, "b")]
        assert not output.finished
        fake.client.emit(second, "c")
        output = await anext(outputs)
        assert [(c.index, c.text) for c in output.outputs] == [(1, "c")]
    assert fake.client.aborted == [second.request_id]


async def test_n_completions_final_only_come_together_in_order(fake: FakeEngine) -> None:
    async with fake.llm.stream("x", SamplingParams(n=2, output_kind=FINAL_ONLY)) as outputs:
        first, second = fake.client.added
        fake.client.emit(second, "b", FinishReason.LENGTH)
        fake.client.emit(first, "a", FinishReason.LENGTH)
        output = await anext(outputs)
    assert [(c.index, c.text) for c in output.outputs] == [(0, "a"), (1, "b")]
    assert output.finished


async def test_logprobs_name_their_tokens_the_sampled_one_first(fake: FakeEngine) -> None:
    token = SampledToken(97, LogprobRow((97, 98, 97), (-0.5, -0.25, -0.5), (2, 1, 2)))
    async with fake.llm.stream("x", SamplingParams(logprobs=2)) as outputs:
        fake.client.emit(fake.client.added[0], [token], FinishReason.LENGTH)
        completion = (await anext(outputs)).outputs[0]
    assert completion.logprobs is not None
    (position,) = completion.logprobs
    assert [(token_id, p.decoded_token, p.rank) for token_id, p in position.items()] == [
        (97, "a", 2),
        (98, "b", 1),
    ]
    assert completion.cumulative_logprob == -0.5


async def test_abort_by_name_gives_the_reader_an_end(fake: FakeEngine) -> None:
    async with fake.llm.stream("x", SamplingParams(output_kind=DELTA), request_id="mine") as outputs:
        (add,) = fake.client.added
        fake.client.emit(add, "a")
        await wait_all_tasks_blocked()
        fake.llm.abort("mine")
        output = await anext(outputs)
    assert text_of(output) == "a"
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    assert fake.client.aborted == [add.request_id]


async def test_names_need_not_be_unique(fake: FakeEngine) -> None:
    async with fake.llm.stream("x", request_id="same"), fake.llm.stream("y", request_id="same"):
        fake.llm.abort("same")
    assert sorted(fake.client.aborted) == [add.request_id for add in fake.client.added]


async def test_the_engines_death_is_raised_at_every_consumer_and_nowhere_else(fake: FakeEngine) -> None:
    deaths: list[str] = []

    async def consume(prompt: str) -> None:
        try:
            await fake.llm.complete(prompt)
        except EngineDeadError as error:
            deaths.append(str(error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(consume, "x")
        nursery.start_soon(consume, "y")
        await wait_all_tasks_blocked()
        fake.client.die("out of memory")
    assert deaths == ["out of memory"] * 2
    assert fake.llm.errored
    assert not fake.llm.is_running
    assert str(await fake.llm.wait_dead()) == "out of memory"
    with pytest.raises(EngineDeadError, match="out of memory"):
        await fake.llm.complete("z")
    with pytest.raises(EngineDeadError):
        await fake.llm.check_health()


async def test_an_engine_that_sends_nonsense_is_dead(fake: FakeEngine) -> None:
    async with fake.llm.stream("x") as outputs:
        fake.client.emit_nonsense()
        with pytest.raises(EngineDeadError, match="unreadable"):
            await anext(outputs)


async def test_what_was_finished_before_the_death_can_still_be_read(fake: FakeEngine) -> None:
    async with fake.llm.stream("x") as outputs:
        fake.client.emit(fake.client.added[0], "a", FinishReason.LENGTH)
        fake.client.die()
        await wait_all_tasks_blocked()
        assert text_of(await anext(outputs)) == "a"


@pytest.mark.parametrize(
    ("prompt", "params", "parameter"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([1, 300], {}, "prompt"),
        ([-1], {}, "prompt"),
        ("x" * 128, {}, "prompt"),
        ("x" * 100_000, {}, "prompt"),
        ("x" * 100, {"max_tokens": 29}, "prompt"),
        ("x", {"logit_bias": {300: 1}}, "logit_bias"),
        ("x", {"stop_token_ids": [257]}, "stop_token_ids"),
    ],
)
async def test_what_cannot_be_served_is_refused_before_the_engine_hears_of_it(
    fake: FakeEngine, prompt: str | list[int], params: dict[str, object], parameter: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await fake.llm.complete(prompt, SamplingParams(**params))
    assert caught.value.parameter == parameter
    assert fake.client.added == []


@pytest.mark.parametrize("prompt", [3, None, {"text": "x"}])
async def test_no_form_of_prompt_is_a_type_error(fake: FakeEngine, prompt: object) -> None:
    with pytest.raises(TypeError):
        await fake.llm.complete(prompt)  # type: ignore[arg-type]


async def test_a_long_prompt_is_tokenized_like_a_short_one(fake: FakeEngine) -> None:
    text = "é" * 2_500
    with pytest.raises(InvalidRequestError, match="5000 tokens"):
        await fake.llm.complete(text)


async def test_chat_messages_become_the_templates_text(fake: FakeEngine) -> None:
    prompt = await fake.llm.render_chat([{"role": "user", "content": "hi"}])
    assert prompt.text == "<user>hi\n<assistant>"
    half = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]
    prompt = await fake.llm.render_chat(half, add_generation_prompt=False, continue_final_message=True)
    assert prompt.text == "<user>hi\n<assistant>I am"


async def test_a_watcher_hears_of_news(fake: FakeEngine) -> None:
    channels = [await fake.llm.submit(prompt) for prompt in "xy"]
    heard: list[int] = []
    for number, channel in enumerate(channels):
        channel.watcher = lambda number=number: heard.append(number)
    fake.client.emit(fake.client.added[1], "b", FinishReason.LENGTH)
    await wait_all_tasks_blocked()
    assert heard == [1]
    assert [channel.has_news for channel in channels] == [False, True]
    for channel in channels:
        fake.llm.release(channel)
    assert fake.client.aborted == [fake.client.added[0].request_id]


async def test_a_request_that_is_open_when_the_llm_closes_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[Exception] = []

    async def consume(llm: AsyncLLM) -> None:
        try:
            await llm.complete("x")
        except ClosedError as error:
            failures.append(error)

    async with trio.open_nursery() as nursery, open_fake_llm(tmp_path, monkeypatch, strict=False) as fake:
        nursery.start_soon(consume, fake.llm)
        await wait_all_tasks_blocked()
    assert len(failures) == 1
    with pytest.raises(ClosedError):
        await fake.llm.complete("x")


async def test_the_bodys_error_passes_ungrouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with open_fake_llm(tmp_path, monkeypatch):
            raise KeyError("mine")


async def test_eos_is_not_shown(fake: FakeEngine) -> None:
    async with fake.llm.stream("x", SamplingParams(skip_special_tokens=False)) as outputs:
        fake.client.emit(fake.client.added[0], [97, EOS], FinishReason.STOP)
        output = await anext(outputs)
    assert text_of(output) == "a"
    assert output.outputs[0].stop_reason is None


@pytest.mark.parametrize(
    ("prompt", "options", "params", "parameter"),
    [
        (TokensPrompt([-1]), {}, {}, "prompt"),
        ("half a character: \ud800", {}, {}, "prompt"),
        ("x", {"priority": 2**70}, {}, "priority"),
        ("x", {"cache_salt": "\ud800"}, {}, "cache_salt"),
    ],
)
async def test_what_cannot_be_sent_to_the_engine_is_the_requests_fault(
    fake: FakeEngine, prompt: Any, options: dict[str, Any], params: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await fake.llm.submit(prompt, SamplingParams(**params), **options)
    assert caught.value.parameter == parameter
    assert fake.llm.num_open_requests == 0


async def test_a_failing_add_leaves_nothing_registered(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Add) -> None:
        raise OverloadedError("too far behind")

    monkeypatch.setattr(fake.client, "add", refuse)
    with pytest.raises(OverloadedError):
        await fake.llm.complete("x")
    assert fake.llm.num_open_requests == 0


async def test_reading_a_stream_whose_scope_has_ended_is_an_error_and_no_wait(fake: FakeEngine) -> None:
    async with fake.llm.stream("x") as outputs:
        pass
    with trio.fail_after(5), pytest.raises(ClosedError, match="scope"):
        await anext(outputs)


async def test_a_stream_can_be_entered_once(fake: FakeEngine) -> None:
    stream = fake.llm.stream("x")
    async with stream:
        with pytest.raises(ClosedError, match="once"):
            await stream.__aenter__()


async def test_one_completions_failing_tokenizer_is_nobody_elses_trouble(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake.llm.stream("x") as broken, fake.llm.stream("y") as sound:
        first, second = fake.client.added
        assert isinstance(broken._source, SubmittedRequest)
        channel = broken._source.channel

        def fail(_: object) -> None:
            raise RuntimeError("boom")

        monkeypatch.setattr(channel.completions[0], "push", fail)
        fake.client.emit_step([(first, "a", None, None), (second, "b", FinishReason.LENGTH, None)])
        assert (await anext(broken)).outputs[0].finish_reason is FinishReason.ERROR
        assert text_of(await anext(sound)) == "b"
    assert fake.client.aborted == [first.request_id]


async def test_a_malformed_step_takes_nobody_half_way(fake: FakeEngine) -> None:
    """The step names two requests, and has the tokens of only one: both hear of the engine's end."""
    async with fake.llm.stream("x") as one, fake.llm.stream("y") as other:
        first, second = fake.client.added
        fake.client.emit_step(
            [(first, "a", FinishReason.LENGTH, None), (second, "b", None, None)], drop_last_token=True
        )
        for outputs in (one, other):
            with trio.fail_after(5), pytest.raises(EngineDeadError, match="unreadable"):
                await anext(outputs)


async def test_a_stop_string_in_the_very_last_bytes_counts(fake: FakeEngine) -> None:
    async with fake.llm.stream("x", SamplingParams(stop="\ufffd")) as outputs:
        fake.client.emit(fake.client.added[0], b"a\xc3", FinishReason.LENGTH)
        output = (await anext(outputs)).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", FinishReason.STOP, "\ufffd")


async def test_the_time_of_the_first_token_is_known_only_where_tokens_travel(fake: FakeEngine) -> None:
    async with fake.llm.stream("x", SamplingParams(output_kind=DELTA)) as outputs:
        fake.client.emit(fake.client.added[0], "ab", FinishReason.LENGTH)
        metrics = (await anext(outputs)).metrics
    assert metrics is not None
    assert metrics.first_token_time is not None
    async with fake.llm.stream("x", SamplingParams(output_kind=FINAL_ONLY)) as outputs:
        fake.client.emit(fake.client.added[1], "ab", FinishReason.LENGTH)
        metrics = (await anext(outputs)).metrics
    assert metrics is not None
    assert metrics.first_token_time is None
    assert metrics.num_generation_tokens == 2
