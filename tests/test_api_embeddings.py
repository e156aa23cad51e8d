"""POST /v1/embeddings: forms of the input, formats of the answer, limits, errors."""

from __future__ import annotations

import base64
import json
import struct
import sys
from typing import Any

import pytest
import trio
import trio.testing

from helpers_api import Client, Exchange, FakeLLM, Reply
from helpers_pooling_api import SIZE, FakePoolingLLM, values_of
from trioserve.errors import OverloadedError
from trioserve.frontend.prompts import TextPrompt, Truncation
from trioserve.pooling_params import PoolingParams
from trioserve.server_args import ServerArgs

PATH = "/v1/embeddings"
BOTH = ("add_generation_prompt", "continue_final_message")
USER = {"role": "user", "content": "Hi"}


async def ask(llm: FakeLLM, **request: Any) -> Reply:
    return await Client(llm).post(PATH, {"input": "abc de"} | request)


async def test_reply() -> None:
    llm = FakePoolingLLM()
    reply = (await ask(llm)).json
    assert reply["data"] == [{"index": 0, "object": "embedding", "embedding": list(values_of(6))}]
    assert (reply["object"], reply["model"]) == ("list", "small")
    assert reply["id"].startswith("embd-")
    assert reply["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    (call,) = llm.pooled
    assert call.request_id == reply["id"]
    assert call.prompts == [TextPrompt("abc de")]
    assert call.params == PoolingParams(task="embed")


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("abc", [TextPrompt("abc")]),
        (["a", "bc"], [TextPrompt("a"), TextPrompt("bc")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
async def test_texts_and_token_ids_alone_and_in_lists(given: Any, prompts: list[Any]) -> None:
    llm = FakePoolingLLM()
    reply = (await ask(llm, input=given)).json
    assert llm.pooled[0].prompts == prompts
    assert [item["index"] for item in reply["data"]] == list(range(len(prompts)))


async def test_fields_reach_the_engine() -> None:
    llm = FakePoolingLLM()
    reply = await ask(
        llm, model="also-small", dimensions=4, use_activation=False, add_special_tokens=False, priority=3,
        request_id="mine", truncate_prompt_tokens=5, user="u", encoding_format=None, timeout=5,
    )  # fmt: skip
    (call,) = llm.pooled
    assert call.prompts == [TextPrompt("abc de", False, truncation=Truncation(5, keeps_end=False))]
    assert call.params == PoolingParams(task="embed", dimensions=4, use_activation=False)
    assert (call.request_id, call.priority) == ("embd-mine", 3)
    assert reply.headers["x-request-id"] == "mine"
    assert len(reply.json["data"][0]["embedding"]) == 4


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [1, 2]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [1, 2]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, [3, 4]),
        ({"truncate_prompt_tokens": -1}, [1, 2, 3, 4]),
        ({"truncation_side": "left"}, [1, 2, 3, 4]),
    ],
)
async def test_token_ids_are_cut_at_either_side(fields: dict[str, Any], kept: list[int]) -> None:
    llm = FakePoolingLLM()
    await ask(llm, input=[1, 2, 3, 4], **fields)
    assert llm.pooled[0].prompts == [kept]


async def test_minus_1_is_all_that_the_model_takes() -> None:
    llm = FakePoolingLLM()
    await ask(llm, truncate_prompt_tokens=-1)
    assert llm.pooled[0].prompts[0].truncation == Truncation(64, keeps_end=False)


async def test_conversations_are_rendered() -> None:
    llm = FakePoolingLLM()
    client = Client(llm)
    one = await client.post(PATH, {"messages": [USER], "chat_template_kwargs": {"kind": "query"}})
    two = await client.post(PATH, {"messages": [[USER], [USER, USER]], "add_special_tokens": True})
    assert [len(reply.json["data"]) for reply in (one, two)] == [1, 2]
    assert llm.pooled[0].prompts == [TextPrompt("user: Hi", add_special_tokens=False)]
    assert llm.pooled[1].prompts == [TextPrompt("user: Hi"), TextPrompt("user: Hi user: Hi")]
    assert llm.rendered[0]["template_kwargs"] == {"kind": "query"}
    assert llm.rendered[0]["add_generation_prompt"] is False


# Formats


def unpack(data: bytes, code: str = "f", order: str = "=") -> list[float]:
    return list(struct.unpack(f"{order}{len(data) // struct.calcsize(code)}{code}", data))


@pytest.mark.parametrize("encoding_format", ["float", None])
async def test_numbers(encoding_format: str | None) -> None:
    reply = (await ask(FakePoolingLLM(), input=["a", "bc"], encoding_format=encoding_format)).json
    assert [item["embedding"] for item in reply["data"]] == [list(values_of(1)), list(values_of(2))]


@pytest.mark.parametrize(
    ("fields", "code", "order"),
    [
        ({}, "f", "="),
        ({"embed_dtype": "float32", "endianness": "native"}, "f", "="),
        ({"endianness": "big"}, "f", ">"),
        ({"endianness": "little"}, "f", "<"),
        ({"embed_dtype": "float16"}, "e", "="),
        ({"embed_dtype": "float16", "endianness": "big"}, "e", ">"),
    ],
)
async def test_base64(fields: dict[str, Any], code: str, order: str) -> None:
    reply = (await ask(FakePoolingLLM(), input=["a", "bc"], encoding_format="base64", **fields)).json
    found = [unpack(base64.b64decode(item["embedding"]), code, order) for item in reply["data"]]
    assert found == [list(values_of(1)), list(values_of(2))]


async def test_bytes_come_with_a_header_that_says_whose_they_are() -> None:
    reply = await ask(FakePoolingLLM(), input=["a", "bc"], encoding_format="bytes", endianness="big")
    assert reply.headers["content-type"] == "application/octet-stream"
    assert reply.headers["content-length"] == str(2 * SIZE * 4)
    assert unpack(reply.body, order=">") == [*values_of(1), *values_of(2)]
    metadata = json.loads(reply.headers["metadata"])
    assert metadata["id"].startswith("embd-")
    assert metadata["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    assert metadata["data"] == [
        {
            "index": index, "embed_dtype": "float32", "endianness": "big", "start": index * SIZE * 4,
            "end": (index + 1) * SIZE * 4, "shape": [SIZE],
        }
        for index in range(2)
    ]  # fmt: skip


async def test_bytes_only() -> None:
    reply = await ask(FakePoolingLLM(), input=["a"] * 500, encoding_format="bytes_only")
    assert "metadata" not in reply.headers
    assert unpack(reply.body) == [*values_of(1)] * 500


async def test_what_is_large_comes_in_pieces() -> None:
    """The same bytes, which no single message holds."""
    texts = ["a" * (index % 50 + 1) for index in range(2048)]
    floats = Exchange(Client(FakePoolingLLM()).app, "POST", PATH, *_body(input=texts))
    await floats.run()
    assert floats.num_parts > 2
    data = floats.reply.json["data"]
    assert [item["index"] for item in data] == list(range(2048))
    assert [item["embedding"] for item in data] == [list(values_of(len(text))) for text in texts]
    binary = await ask(FakePoolingLLM(), input=texts, encoding_format="bytes_only")
    assert unpack(binary.body) == [value for text in texts for value in values_of(len(text))]


def _body(**request: Any) -> tuple[bytes, dict[str, str]]:
    return json.dumps(request).encode(), {"content-type": "application/json"}


# Errors


@pytest.mark.parametrize(
    ("request_fields", "param", "words"),
    [
        ({"input": None}, "input", "Exactly one of input and messages must be given"),
        ({"messages": [USER]}, "input", "Exactly one of input and messages must be given"),
        ({"input": ""}, "input", "input must not be an empty string"),
        ({"input": ["a", ""]}, "input[1]", "input[1] must not be an empty string"),
        ({"input": []}, "input", "input must hold at least one text"),
        ({"input": [[1], []]}, "input[1]", "input[1] must not be an empty list of tokens"),
        ({"input": ["a"] * 2049}, "input", "input must hold at most 2048 texts, got 2049"),
        ({"input": [[1]] * 2049}, "input", "input must hold at most 2048 texts, got 2049"),
        ({"input": 7}, "input", "input must be"),
        ({"input": ["a", 7]}, "input[1]", "input[1] must be a string, got 7"),
        ({"input": [99]}, "input", "unknown tokens"),
        ({"encoding_format": "hex"}, "encoding_format", "one of 'float', 'base64', 'bytes', 'bytes_only'"),
        ({"input": ["a"] * 129, "encoding_format": "bytes"}, "encoding_format", "at most 128, got 129"),
        ({"embed_dtype": "int4"}, "embed_dtype", "one of 'float32'"),
        ({"endianness": "middle"}, "endianness", "one of 'native', 'little', 'big'"),
        ({"dimensions": 0}, "dimensions", "dimensions must be an integer >= 1, got 0"),
        ({"dimensions": SIZE - 1}, "dimensions", "dimensions must be another"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "an integer >= 1, or -1"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "would leave nothing of the text"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "at most 64"),
        ({"truncation_side": "middle"}, "truncation_side", "one of 'left', 'right'"),
        ({"add_generation_prompt": True}, "add_generation_prompt", "only allowed with messages"),
        ({"input": None, "messages": []}, "messages", "at least one message"),
        ({"input": None, "messages": [[USER], []]}, "messages", "at least one message"),
        (
            {"input": None, "messages": [USER], **dict.fromkeys(BOTH, True)},
            "continue_final_message", "cannot both be true",
        ),
        ({"input": None, "messages": [USER], "chat_template": "x"}, "chat_template", "must be null"),
        ({"timeout": 0}, "timeout", "a number of seconds > 0"),
        ({"request_id": "\n"}, "request_id", "printable ASCII"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_said(request_fields: dict[str, Any], param: str, words: str) -> None:
    llm = FakePoolingLLM()
    reply = await ask(llm, **request_fields)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert words in reply.error["message"]
    assert not llm.pooled


async def test_another_model_is_not_found() -> None:
    reply = await ask(FakePoolingLLM(), model="large")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def test_a_model_that_generates_says_what_it_can_do() -> None:
    reply = await ask(FakeLLM())
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert "The tasks are of 'small' generate" in reply.error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/classify", {"input": "Hi"}),
    ],
)
async def test_a_model_that_embeds_says_what_it_can_do(path: str, body: Any) -> None:
    reply = await Client(FakePoolingLLM("embed", "score")).post(path, body)
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert "The tasks are of 'small' embed, score" in reply.error["message"]


async def test_it_needs_the_key_and_is_behind_the_door() -> None:
    llm = FakePoolingLLM()
    client = Client(llm, ServerArgs(api_key=("k",), max_requests_per_minute_per_key=1))
    assert (await client.post(PATH, {"input": "a"})).status == 401
    assert (await client.post("/pooling", {"input": "a"})).status == 401
    assert (await client.post(PATH, {"input": "a"}, authorization="Bearer k")).status == 200
    assert (await client.post(PATH, {"input": "a"}, authorization="Bearer k")).status == 429
    llm.room = 1
    assert (await ask(llm, input=["a", "b"])).status == 503
    llm.no_room = OverloadedError("Too many wait.")
    assert (await ask(llm)).status == 503


# Leaving


async def test_a_client_that_leaves_ends_its_request() -> None:
    llm = FakePoolingLLM(waits=trio.sleep_forever)
    exchange = Exchange(Client(llm).app, "POST", PATH, *_body(input=["a", "b"]))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange.run)
        await trio.testing.wait_all_tasks_blocked()
        assert llm.running
        exchange.leave()
    assert not llm.running


async def test_a_request_ends_at_its_deadline(autojump_clock: trio.testing.MockClock) -> None:
    llm = FakePoolingLLM(waits=trio.sleep_forever)
    reply = await ask(llm, timeout=3)
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    assert not llm.running


def test_the_machine_has_the_order_that_the_tests_take_for_native() -> None:
    assert struct.pack("=H", 1) == (1).to_bytes(2, sys.byteorder)
