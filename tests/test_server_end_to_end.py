"""The real server, the real model, the real client."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from served import MODEL, STEADY, ServedModel, served, wait_for
from trioserve import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]


@pytest.fixture
def client(server: ServedModel) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=QUESTION, **GREEDY)
    (choice,) = answer.choices
    assert "Tokyo" in (choice.message.content or "")
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens < 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_is_the_same_text_with_usage_at_the_end(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=QUESTION, **GREEDY)
    with client.chat.completions.create(
        messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]


def test_streamed_text_is_non_streamed_text_is_offline_text(client: openai.OpenAI) -> None:
    prompts = ["Once upon a time", "A list of emoji: 🙂", "def fibonacci(n):", "The number 1234567 is"]
    whole = client.completions.create(prompt=prompts, **GREEDY)
    texts = [choice.text for choice in sorted(whole.choices, key=lambda choice: choice.index)]
    streamed = dict.fromkeys(range(len(prompts)), "")
    with client.completions.create(prompt=prompts, stream=True, **GREEDY) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
    assert list(streamed.values()) == texts
    with LLM(model=MODEL, dtype=STEADY, threads=1) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == texts


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=QUESTION, logprobs=True, top_logprobs=3, **GREEDY)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert answer.usage is not None
    assert len(content) == answer.usage.completion_tokens
    # One entry per token; the last is the end of the turn, which has no text.
    assert "".join(token.token for token in content[:-1]) == answer.choices[0].message.content
    for token in content:  # greedy: the sampled token is the most likely one
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert bytes(token.bytes or []).decode() == token.token
    plain = client.completions.create(prompt="Once upon a time", logprobs=2, **GREEDY)
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == len(logprobs.token_logprobs or []) == 24


def test_n_and_seed(client: openai.OpenAI) -> None:
    sampled = {**GREEDY, "temperature": 1.0}
    pair = client.completions.create(prompt="Once upon a time", n=2, seed=11, **sampled)
    first, second = sorted(pair.choices, key=lambda choice: choice.index)
    assert first.text != second.text
    again = client.completions.create(prompt="Once upon a time", n=2, seed=11, **sampled)
    assert sorted(c.text for c in again.choices) == sorted([first.text, second.text])


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt="Once upon a time", **GREEDY).choices[0].text
    word = whole.split()[3]
    cut = client.completions.create(prompt="Once upon a time", stop=[f" {word}"], **GREEDY).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole[: whole.index(f" {word}")]


def test_models_version_health(server: ServedModel, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert server.request("GET", "/health") == (200, "")
    status, version = server.request("GET", "/version")
    assert status == 200
    assert version["version"]


def test_metrics_count_what_was_done(server: ServedModel, client: openai.OpenAI) -> None:
    names = ("generation_tokens_total", "request_success_total", "time_to_first_token_seconds_count")
    before = [server.metric(name) for name in names]
    with client.completions.create(
        prompt="Hello", model=MODEL, max_tokens=7, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        assert len(list(stream)) >= 1
    after = [server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [7, 1, 1]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"messages": "hello"}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content"),
        ({"model": "gpt-9"}, 404, "model"),
        ({"temperature": 3}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 0}, 400, "n"),
        ({"stop": [""]}, 400, "stop"),
        ({"top_p": "high"}, 400, "top_p"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "messages"),
    ],
)
def test_bad_input_is_named_and_the_server_serves_on(
    server: ServedModel, change: dict[str, Any], status: int, param: str
) -> None:
    body = {"messages": QUESTION, **GREEDY, **change}
    got, answer = server.request("POST", "/v1/chat/completions", body)
    assert got == status, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert (error["code"] == "context_length_exceeded") == ("word word" in str(change))
    assert server.request("GET", "/health")[0] == 200


def test_a_body_that_is_no_json_or_too_large_is_refused(server: ServedModel) -> None:
    status, answer = server.request("POST", "/v1/chat/completions", b'{"model": ')
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    status, answer = server.request("POST", "/v1/chat/completions", b"x" * 20_000_000)
    assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
    assert server.request("GET", "/health")[0] == 200


@pytest.mark.parametrize("kind", ["stream", "idle", "reset"])
def test_a_client_that_leaves_frees_the_engine(server: ServedModel, kind: str) -> None:
    body = {"model": MODEL, "prompt": "Tell me", "max_tokens": 4000, "ignore_eos": True}
    body["stream"] = kind != "idle"
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(data) + data
    sockets = []
    for _ in range(4):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(request)
        sockets.append(connection)
    wait_for(lambda: server.metric("num_requests_running") == 4)
    for connection in sockets:
        if kind == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    server.wait_until_idle()


def test_the_sdks_own_ways_of_leaving_free_the_engine(server: ServedModel, client: openai.OpenAI) -> None:
    forever = {"model": MODEL, "prompt": "x", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    with client.completions.create(stream=True, **forever) as stream:
        next(iter(stream))
    server.wait_until_idle()

    async def cancelled() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as own:
            await asyncio.wait_for(own.completions.create(**forever), 0.5)

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    server.wait_until_idle()


def test_the_api_process_is_small_and_has_no_torch(tmp_path: Path) -> None:
    """One of its own, that has had no other tests' requests."""
    with (
        served(tmp_path, ["--dtype", STEADY]) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        client.chat.completions.create(messages=QUESTION, **GREEDY)
        process = Path("/proc") / str(server.process.pid)
        resident = next(
            line for line in (process / "status").read_text().splitlines() if line.startswith("VmHWM")
        )
        assert int(resident.split()[1]) < 170_000  # kB, with what the tests put in to check its answers
        assert "libtorch" not in (process / "maps").read_text()
