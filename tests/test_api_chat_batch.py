"""POST /v1/chat/completions/batch."""

from __future__ import annotations

from typing import Any

import pytest

from helpers_api import Answer, Call, Client, FakeLLM
from trioserve.errors import EngineDeadError

PATH = "/v1/chat/completions/batch"
CHATS = [
    [{"role": "user", "content": "one"}],
    [{"role": "system", "content": "a"}, {"role": "user", "content": "two words"}],
]


def by_length(call: Call, _index: int) -> Answer:
    return Answer(token_ids=(0,) * len(call.token_ids))


async def test_every_conversation_is_a_choice() -> None:
    llm = FakeLLM(by_length)
    reply = (await Client(llm).post(PATH, {"messages": CHATS, "temperature": 0.5, "max_tokens": 9})).json
    assert reply["object"] == "chat.completion"
    assert [(choice["index"], choice["message"]["content"]) for choice in reply["choices"]] == [
        (0, "HelloHello"),
        (1, "HelloHelloHelloHelloHello"),
    ]
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 7, 14)
    assert [call.request_id for call in llm.calls] == [f"{reply['id']}-0", f"{reply['id']}-1"]
    assert {(call.params.temperature, call.params.max_tokens) for call in llm.calls} == {(0.5, 9)}
    assert not llm.running


async def test_one_that_fails_fails_the_whole() -> None:
    def script(call: Call, _index: int) -> Answer:
        return Answer(error=EngineDeadError("gone") if len(call.token_ids) == 2 else None)

    llm = FakeLLM(script)
    assert (await Client(llm).post(PATH, {"messages": CHATS})).status == 500
    assert not llm.running


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": CHATS[0]}, "messages[0]"),
        ({"messages": [CHATS[0], [{"role": "user"}]]}, "messages[1][0].content"),
        ({"messages": [CHATS[0]] * 2049}, "messages"),
        ({"messages": [CHATS[0] * 8193] * 2}, "messages"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"store": True}, "store"),
    ],
)
async def test_what_makes_no_sense_names_the_field(fields: dict[str, Any], param: str) -> None:
    llm = FakeLLM()
    reply = await Client(llm).post(PATH, {"messages": CHATS, **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert not llm.calls


async def test_a_conversation_that_is_too_long() -> None:
    chats = [*CHATS, [{"role": "user", "content": "word " * 100}]]
    llm = FakeLLM()
    reply = await Client(llm).post(PATH, {"messages": chats})
    assert (reply.error["param"], reply.error["code"]) == ("messages", "context_length_exceeded")
    assert not llm.running


async def test_all_of_it_has_to_fit_in() -> None:
    llm = FakeLLM()
    llm.room = 1
    assert (await Client(llm).post(PATH, {"messages": CHATS})).status == 503
    assert not llm.calls
