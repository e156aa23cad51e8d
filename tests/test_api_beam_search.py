"""`use_beam_search`: the n best answers in place of n drawn ones."""

from __future__ import annotations

from typing import Any

import pytest

from helpers_api import Answer, Call, Client, FakeLLM, Reply
from trioserve.beam_search_params import BeamSearchParams
from trioserve.frontend.prompts import TextPrompt
from trioserve.outputs import FinishReason
from trioserve.structured_outputs import StructuredOutputsParams

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])


async def ask(llm: FakeLLM, path: str, **request: Any) -> Reply:
    prompt = {"prompt": "Hi there"} if path == TEXT else {"messages": [{"role": "user", "content": "Hi"}]}
    return await Client(llm).post(path, {"use_beam_search": True, "max_tokens": 5} | prompt | request)


def ranked(call: Call, index: int) -> Answer:
    return [Answer(stop_reason=11), Answer(token_ids=(4, 5), reason=FinishReason.LENGTH)][index]


async def test_the_best_answers_of_chat_in_order() -> None:
    llm = FakeLLM(ranked)
    reply = (await ask(llm, CHAT, n=2, return_token_ids=True)).json
    first, second = reply["choices"]
    assert (first["message"]["content"], second["message"]["content"]) == ("Hello, world", " How are")
    assert (first["finish_reason"], first["stop_reason"]) == ("stop", 11)
    assert (second["finish_reason"], second["stop_reason"]) == ("length", None)
    assert second["token_ids"] == [4, 5]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (2, 5)
    (search,) = llm.searches
    assert search.options["request_id"] == reply["id"]
    assert search.params == BeamSearchParams(beam_width=2, max_tokens=5)


async def test_the_best_answers_of_completions_in_order() -> None:
    llm = FakeLLM(ranked)
    reply = (await ask(llm, TEXT, prompt=["a", "b c"], n=2, echo=True)).json
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in reply["choices"]]
    assert texts == ["aHello, world", "a How are", "b cHello, world", "b c How are"]
    assert [search.prompt for search in llm.searches] == [TextPrompt("a"), TextPrompt("b c")]
    assert [search.options["request_id"] for search in llm.searches] == [f"{reply['id']}-{i}" for i in (0, 1)]


@BOTH
async def test_fields_of_a_search(path: str) -> None:
    llm = FakeLLM()
    reply = await ask(
        llm,
        path,
        temperature=0.5,
        length_penalty=0.8,
        ignore_eos=True,
        include_stop_str_in_output=True,
        response_format={"type": "json_object"},
        cache_salt="s",
        priority=2,
        top_p=0.5,
        seed=3,
    )
    assert reply.status == 200
    (search,) = llm.searches
    assert search.params == BeamSearchParams(
        beam_width=1,
        max_tokens=5,
        temperature=0.5,
        length_penalty=0.8,
        ignore_eos=True,
        include_stop_str_in_output=True,
        structured_outputs=StructuredOutputsParams(json_object=True),
    )
    assert (search.options["cache_salt"], search.options["priority"]) == ("s", 2)


async def test_logprobs_of_a_search_are_those_of_the_output() -> None:
    reply = (await ask(FakeLLM(), CHAT, logprobs=True)).json
    positions = reply["choices"][0]["logprobs"]["content"]
    assert [position["token"] for position in positions] == ["Hello", ",", " world"]
    reply = (await ask(FakeLLM(), TEXT, logprobs=0)).json
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 3


@BOTH
@pytest.mark.parametrize(
    ("request_fields", "param"),
    [
        ({"stream": True}, "use_beam_search"),
        ({"n": 65}, "n"),
        ({"length_penalty": "long"}, "length_penalty"),
        ({"stop": "x"}, "stop"),
        ({"stop_token_ids": [1]}, "stop_token_ids"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ],
)
async def test_what_does_not_go_with_a_search(path: str, request_fields: Any, param: str) -> None:
    llm = FakeLLM()
    reply = await ask(llm, path, **request_fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert param in reply.error["message"]
    assert not llm.searches


@pytest.mark.parametrize(
    ("path", "request_fields", "param"),
    [
        (CHAT, {"max_tokens": None}, "max_completion_tokens"),
        (CHAT, {"logprobs": True, "top_logprobs": 5, "n": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (TEXT, {"logprobs": 3}, "logprobs"),
    ],
)
async def test_what_a_search_needs_and_cannot_tell(path: str, request_fields: Any, param: str) -> None:
    reply = await ask(FakeLLM(), path, **request_fields)
    assert (reply.status, reply.error["param"]) == (400, param)


@BOTH
async def test_neutral_values_go_with_a_search(path: str) -> None:
    request = {"stop": [], "logit_bias": {}, "repetition_penalty": 1, "frequency_penalty": 0, "min_tokens": 0}
    assert (await ask(FakeLLM(), path, **request, bad_words=[], stop_token_ids=[])).status == 200
