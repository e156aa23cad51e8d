"""What answers tell by the server's flags, and not by the request's fields."""

from __future__ import annotations

from typing import Any

import pytest

from helpers_api import Client, FakeLLM
from trioserve.server_args import ServerArgs

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True},
    COMPLETIONS: {"prompt": "Hi", "logprobs": 0},
}
EACH = pytest.mark.parametrize("path", ASKS)


def names(reply: Any, path: str) -> list[str]:
    """Of the tokens."""
    logprobs = reply["choices"][0]["logprobs"]
    return logprobs["tokens"] if path == COMPLETIONS else [entry["token"] for entry in logprobs["content"]]


@EACH
async def test_tokens_are_named_by_id(path: str) -> None:
    by_id = ServerArgs(return_tokens_as_token_ids=True)
    for args, field, are_ids in [
        (None, None, False), (None, True, True), (by_id, None, True), (by_id, False, False),
    ]:  # fmt: skip
        body = ASKS[path] | {"return_tokens_as_token_ids": field}
        found = names((await Client(FakeLLM(), args).post(path, body)).json, path)
        assert found
        assert [name.startswith("token_id:") for name in found] == [are_ids] * len(found)


async def test_tokens_of_a_batch_are_named_by_id() -> None:
    args = ServerArgs(return_tokens_as_token_ids=True)
    body = ASKS[CHAT] | {"messages": [ASKS[CHAT]["messages"]]}
    reply = await Client(FakeLLM(), args).post(f"{CHAT}/batch", body)
    assert all(name.startswith("token_id:") for name in names(reply.json, CHAT))


@EACH
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
async def test_usage_is_told_in_every_chunk_of_every_stream(
    path: str, options: dict[str, Any] | None
) -> None:
    client = Client(FakeLLM(), ServerArgs(enable_force_include_usage=True))
    streamed = await client.post(path, ASKS[path] | {"stream": True, "stream_options": options})
    *chunks, last, done = streamed.events
    assert done == "[DONE]"
    assert chunks
    assert all(chunk["choices"] and chunk["usage"]["prompt_tokens"] for chunk in chunks)
    assert not last["choices"]
    assert last["usage"] == (await client.post(path, ASKS[path])).json["usage"]
