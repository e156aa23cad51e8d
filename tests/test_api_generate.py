"""/inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from helpers_api import Answer, Client, FakeLLM, Reply
from trioserve.errors import OverloadedError
from trioserve.outputs import FinishReason
from trioserve.sampling_params import RequestOutputKind
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from fake_engine import FakeEngine

PATH = "/inference/v1/generate"


async def generate(llm: FakeLLM, sampling: dict[str, Any] | None = None, **body: Any) -> Reply:
    request = {"token_ids": [1, 2], "sampling_params": sampling or {}}
    return await Client(llm).post(PATH, request | body)


async def test_token_ids_in_and_out() -> None:
    llm = FakeLLM(Answer(token_ids=(3, 4), stop_reason=7))
    reply = (await generate(llm, request_id="mine")).json
    assert (reply["request_id"], reply["model"]) == ("mine", "small")
    assert reply["choices"] == [
        {"index": 0, "token_ids": [3, 4], "logprobs": None, "finish_reason": "stop", "stop_reason": 7}
    ]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (2, 2)
    assert llm.calls[0].prompt == [1, 2]


async def test_parameters_as_the_engine_has_them() -> None:
    llm = FakeLLM()
    sampling = {
        "n": 2, "temperature": 0.5, "seed": 3, "logit_bias": {"1": 2}, "stop": "x", "bad_words": ["y"],
        "structured_outputs": {"choice": ["a", "b"]}, "logprobs": 1, "ignore_eos": True, "unknown": 1,
    }  # fmt: skip
    await generate(llm, sampling, cache_salt="s", priority=2)
    (call,) = llm.calls
    params = call.params
    assert (params.n, params.temperature, params.seed, params.logit_bias) == (2, 0.5, 3, {1: 2.0})
    assert (params.stop, params.bad_words, params.ignore_eos) == (("x",), ("y",), True)
    assert params.structured_outputs is not None
    assert params.structured_outputs.choice == ("a", "b")
    assert (params.max_tokens, params.detokenize) == (None, True)
    assert (call.cache_salt, call.priority) == ("s", 2)


async def test_no_text_is_made_without_need() -> None:
    llm = FakeLLM()
    await generate(llm)
    assert not llm.calls[0].params.detokenize


async def test_logprobs() -> None:
    llm = FakeLLM(Answer(token_ids=(0,), alternatives=((1, -1.0, 2),)))
    reply = (await generate(llm, {"logprobs": 2, "prompt_logprobs": 1})).json
    (entry,) = reply["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"]) == ("Hello", -0.5)
    assert [top["token"] for top in entry["top_logprobs"]] == ["Hello", ","]
    assert reply["prompt_logprobs"][0] is None
    assert len(reply["prompt_logprobs"]) == 2


async def test_a_stream() -> None:
    llm = FakeLLM(Answer(token_ids=(3, 4), reason=FinishReason.LENGTH))
    *chunks, done = (await generate(llm, {"n": 2}, stream=True)).events
    assert done == "[DONE]"
    for index in (0, 1):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["token_ids"] for choice in choices] == [[3], [4]]
        assert [choice["finish_reason"] for choice in choices] == [None, "length"]
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert llm.calls[0].params.output_kind is RequestOutputKind.DELTA


async def test_usage_at_the_end_of_a_stream() -> None:
    events = (await generate(FakeLLM(), stream=True, stream_options={"include_usage": True})).events
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 3


async def test_an_error_in_a_stream() -> None:
    events = (await generate(FakeLLM(Answer(error=RuntimeError("x"))), stream=True)).events
    assert events[-2]["error"]["message"] == "Internal server error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "x"}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
        ({"sampling_params": {"temperature": "x"}}, "sampling_params.temperature"),
        ({"sampling_params": {"min_tokens": 5, "max_tokens": 4}}, "sampling_params.min_tokens"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "sampling_params.prompt_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"features": {}}, "features"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"timeout": 0}, "timeout"),
    ],
)
async def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    reply = await generate(FakeLLM(), **body)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_an_unknown_token_is_named(fake: FakeEngine) -> None:
    client = Client(fake.llm)  # type: ignore[arg-type]  # the client knows FakeLLM only
    reply = await client.post(PATH, {"token_ids": [1, 300]})
    assert (reply.status, reply.error["param"]) == (400, "token_ids")


async def test_it_is_behind_the_door() -> None:
    llm = FakeLLM()
    llm.no_room = OverloadedError("Too many wait.")
    assert (await generate(llm)).status == 503
    assert (await generate(FakeLLM(), model="x")).status == 404
    reply = await Client(FakeLLM(), ServerArgs(api_key=("k",))).post(PATH, {"token_ids": [1]})
    assert reply.status == 401
