"""/tokenize, /detokenize and /tokenizer_info, on the tokenizer of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from byte_tokenizer import CHAT_TEMPLATE, EOS
from helpers_api import Client, Reply
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from fake_engine import FakeEngine

MESSAGES = [{"role": "user", "content": "Hi"}]
RENDERED = "<user>Hi\n<assistant>"
TEXTS = ["", "Hi", "caf\u00e9 \U0001fae0", "line\nbreaks\t", "a" * 5000 + "\u00e9"]


def client(fake: FakeEngine, **args: Any) -> Client:
    return Client(fake.llm, ServerArgs(**args))  # type: ignore[arg-type]  # the client knows FakeLLM only


async def tokenize(fake: FakeEngine, **body: Any) -> Reply:
    return await client(fake).post("/tokenize", body)


@pytest.mark.parametrize("text", TEXTS)
async def test_there_and_back(fake: FakeEngine, text: str) -> None:
    reply = (await tokenize(fake, prompt=text)).json
    assert reply["tokens"] == list(text.encode())
    assert (reply["count"], reply["max_model_len"]) == (len(text.encode()), 128)
    assert reply["token_strs"] is None
    back = await client(fake).post("/detokenize", {"tokens": reply["tokens"]})
    assert back.json == {"prompt": text}


async def test_tokens_are_shown_as_the_vocabulary_spells_them(fake: FakeEngine) -> None:
    reply = await tokenize(fake, prompt="a b", return_token_strs=True)
    assert reply.json["token_strs"] == ["a", "\u0120", "b"]


async def test_a_conversation_is_rendered_first(fake: FakeEngine) -> None:
    assert bytes((await tokenize(fake, messages=MESSAGES)).json["tokens"]).decode() == RENDERED
    without = await tokenize(fake, messages=MESSAGES, add_generation_prompt=False)
    assert bytes(without.json["tokens"]).decode() == "<user>Hi\n"


async def test_the_tokens_of_a_conversation_are_those_that_a_chat_completion_has(fake: FakeEngine) -> None:
    rendered = await client(fake).post("/v1/chat/completions/render", {"messages": MESSAGES})
    assert rendered.json["token_ids"] == (await tokenize(fake, messages=MESSAGES)).json["tokens"]


async def test_special_tokens_are_known_and_shown(fake: FakeEngine) -> None:
    assert (await tokenize(fake, prompt="a<eos>")).json["tokens"] == [ord("a"), EOS]
    back = await client(fake).post("/detokenize", {"tokens": [ord("a"), EOS]})
    assert back.json == {"prompt": "a<eos>"}


async def test_what_no_request_could_have_is_tokenized_too(fake: FakeEngine) -> None:
    reply = await tokenize(fake, prompt="x" * 100_000)
    assert reply.json["count"] == 100_000


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": MESSAGES}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"prompt": "\ud800"}, None),
        ({"prompt": "x", "tools": []}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ({"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
    ],
)
async def test_a_wrong_field_is_named(fake: FakeEngine, body: dict[str, Any], param: str | None) -> None:
    reply = await tokenize(fake, **body)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize("token", [-1, 257, 2**31, 2**63, 2**70])
async def test_a_token_that_there_is_not_is_named(fake: FakeEngine, token: int) -> None:
    reply = await client(fake).post("/detokenize", {"tokens": [1, token]})
    assert (reply.status, reply.error["param"]) == (400, "tokens[1]")
    assert "from 0 to 256" in reply.error["message"]


async def test_an_unknown_model(fake: FakeEngine) -> None:
    assert (await tokenize(fake, prompt="x", model="other")).status == 404
    assert (await client(fake).post("/detokenize", {"tokens": [], "model": "other"})).status == 404


async def test_many_tokens_become_text(fake: FakeEngine) -> None:
    reply = await client(fake).post("/detokenize", {"tokens": [ord("y")] * 20_000})
    assert reply.json == {"prompt": "y" * 20_000}


async def test_the_tokenizers_configuration_needs_a_flag(fake: FakeEngine) -> None:
    assert (await client(fake).get("/tokenizer_info")).status == 404
    served = client(fake, enable_tokenizer_info_endpoint=True)
    info = (await served.get("/tokenizer_info")).json
    assert info == {
        "eos_token": "<eos>", "chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    path = Path(fake.llm.model.tokenizer_directory) / "tokenizer_config.json"
    path.write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert (await served.get("/tokenizer_info")).json["tokenizer_class"] == "GPT2Tokenizer"
    path.unlink()
    assert (await served.get("/tokenizer_info")).json["chat_template"] == CHAT_TEMPLATE


async def test_a_key_is_needed(fake: FakeEngine) -> None:
    served = client(fake, api_key=("k",))
    assert (await served.post("/tokenize", {"prompt": "x"})).status == 401
    assert (await served.post("/detokenize", {"tokens": []})).status == 401
