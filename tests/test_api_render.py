"""Renderings of completions and chats: sent to /inference/v1/generate, they ask the same of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

from helpers_api import Client, FakeLLM, Reply
from trioserve.server.protocol.generate import TokenSampling

if TYPE_CHECKING:
    from fake_engine import FakeEngine

GENERATE = "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "Hi"}]
MANY_FIELDS: dict[str, Any] = {
    "max_tokens": 5, "temperature": 0.5, "stop": ["x", "y"], "seed": 1, "logit_bias": {"3": -1}, "n": 2,
    "response_format": {"type": "json_object"}, "cache_salt": "s", "priority": 4, "bad_words": ["no"],
    "repetition_detection": {"max_pattern_size": 3}, "vllm_xargs": {"a": [1]}, "min_p": 0.25,
    "allowed_token_ids": [1, 2, 3], "stop_token_ids": [4], "skip_special_tokens": False,
}  # fmt: skip


async def post(fake: FakeEngine, path: str, body: dict[str, Any]) -> Reply:
    return await Client(fake.llm).post(path, body)  # type: ignore[arg-type]  # it knows FakeLLM only


async def asked_of_the_engine(fake: FakeEngine, path: str, body: dict[str, Any]) -> list[Any]:
    """What comes to the engine for a request whose client leaves then."""
    before = len(fake.client.added)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(post, fake, path, body)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return [_seen(add) for add in fake.client.added[before:]]


def _seen(add: Any) -> dict[str, Any]:
    params = {field.name: getattr(add.params, field.name) for field in attrs.fields(TokenSampling)}
    others = ("prompt_token_ids", "constraints", "priority", "cache_salt", "seed")
    return {**{name: getattr(add, name) for name in others}, "params": params}


@pytest.mark.parametrize("fields", [{"seed": 5}, MANY_FIELDS, {"prompt_logprobs": 1, "seed": 1}])
async def test_a_rendered_chat_asks_the_same_of_the_engine(fake: FakeEngine, fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, **fields}
    rendered = (await post(fake, "/v1/chat/completions/render", body)).json
    assert not fake.client.added
    direct = await asked_of_the_engine(fake, "/v1/chat/completions", body)
    assert direct
    assert await asked_of_the_engine(fake, GENERATE, rendered) == direct


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "f"}], "function_call": {"name": "f"}},
        {
            "tools": [{"type": "function", "function": {"name": name}} for name in "fg"],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
        },
    ],
)  # fmt: skip
async def test_a_chat_with_other_spellings_of_tools(fake: FakeEngine, fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "seed": 1, **fields}
    rendered = (await post(fake, "/v1/chat/completions/render", body)).json
    direct = await asked_of_the_engine(fake, "/v1/chat/completions", body)
    assert direct[0]["constraints"]
    assert await asked_of_the_engine(fake, GENERATE, rendered) == direct


async def test_rendered_completions_ask_the_same_of_the_engine(fake: FakeEngine) -> None:
    body = {"prompt": ["Hi", "Ho there"], **MANY_FIELDS}
    rendered = (await post(fake, "/v1/completions/render", body)).json
    assert len(rendered) == 2
    direct = await asked_of_the_engine(fake, "/v1/completions", body)
    assert len(direct) == 4
    sent = [add for part in rendered for add in await asked_of_the_engine(fake, GENERATE, part)]
    assert sent == direct


async def test_what_a_rendering_says(fake: FakeEngine) -> None:
    rendered = await post(
        fake, "/v1/chat/completions/render", {"messages": MESSAGES, "request_id": "mine", "stream": True}
    )
    told = rendered.json
    assert told["prompt"] == "<user>Hi\n<assistant>"
    assert bytes(told["token_ids"]).decode() == told["prompt"]
    assert (told["request_id"], told["model"], told["stream"]) == ("chatcmpl-mine", "fake", True)
    assert told["sampling_params"]["max_tokens"] is None


async def test_token_ids_have_no_text(fake: FakeEngine) -> None:
    (told,) = (await post(fake, "/v1/completions/render", {"prompt": [1, 2, 3]})).json
    assert (told["prompt"], told["token_ids"]) == (None, [1, 2, 3])
    assert told["request_id"].startswith("cmpl-")


async def test_what_cannot_be_rendered_is_refused(fake: FakeEngine) -> None:
    search = await post(fake, "/v1/completions/render", {"prompt": "Hi", "use_beam_search": True})
    assert (search.status, search.error["param"]) == (400, "use_beam_search")
    wrong = await post(fake, "/v1/chat/completions/render", {"messages": []})
    assert (wrong.status, wrong.error["param"]) == (400, "messages")
    assert (await post(fake, "/v1/completions/render", {"prompt": "Hi", "model": "x"})).status == 404


async def test_nothing_runs() -> None:
    llm = FakeLLM()
    await Client(llm).post("/v1/completions/render", {"prompt": "Hi"})
    assert not llm.calls
