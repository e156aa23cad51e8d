"""What is refused, and how: status, OpenAI's error object, the field at fault."""

from __future__ import annotations

import json
import logging

import pytest

from helpers_api import Client, FakeLLM
from trioserve.server_args import ServerArgs

CHAT = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "small", "prompt": "Hi"}
CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"


async def test_so_many_completions_at_a_time() -> None:
    client = Client(FakeLLM())
    request = {"prompt": ["Hi"] * 129, "n": 128}
    reply = await client.post(TEXT_PATH, request)
    assert (reply.status, reply.error["param"]) == (400, "n")
    assert reply.error["message"] == "n times the prompts must be at most 16384, got 16512."
    one_after_the_other = {"prompt": ["Hi"] * 300, "n": 64, "use_beam_search": True}
    assert (await client.post(TEXT_PATH, one_after_the_other)).status == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [*CHAT["messages"], {"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[1].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"function_call": "auto"}, "function_call"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [-1]}, "logprob_token_ids"),
        ({"reasoning_effort": "hard"}, "reasoning_effort"),
        ({"verbosity": "terse"}, "verbosity"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"metadata": {"a": 1}}, "metadata[a]"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"store": True}, "store"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"echo": "yes"}, "echo"),
        ({"chat_template": "x"}, "chat_template"),
        ({"include_reasoning": 0}, "include_reasoning"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
async def test_chat_names_the_wrong_field(change: dict[str, object], param: str) -> None:
    reply = await Client(FakeLLM()).post(CHAT_PATH, CHAT | change)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert reply.error["param"] == param
    assert param in reply.error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [[1], ["a"]]}, "prompt[1][0]"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"suffix": "x", "prompt": [1, 2]}, "suffix"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"suffix": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 3, "use_beam_search": True}, "best_of"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "stream": True, "n": 2}, "echo"),
        ({"echo": True, "logprobs": 1, "use_beam_search": True}, "echo"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)
async def test_completions_name_the_wrong_field(change: dict[str, object], param: str) -> None:
    reply = await Client(FakeLLM()).post(TEXT_PATH, TEXT | change)
    assert (reply.status, reply.error["type"], reply.error["param"]) == (400, "invalid_request_error", param)


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-6}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"seed": "1"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"guided_json": {}}, "guided_json"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"bad_words": ["x", ""]}, "bad_words"),
        ({"bad_words": "x"}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"repetition_detection": {}}, "repetition_detection.max_pattern_size"),
        (
            {"repetition_detection": {"max_pattern_size": 5, "min_count": 1}},
            "repetition_detection.min_count",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3}},
            "repetition_detection.min_pattern_size",
        ),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"vllm_xargs": [1]}, "vllm_xargs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 60, "max_tokens": 5}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": 1}},
            "stream_options.include_obfuscation",
        ),
        ({"cache_salt": ""}, "cache_salt"),
        ({"request_id": "two\nlines"}, "request_id"),
        ({"model": 5}, "model"),
    ],
)
async def test_both_name_the_wrong_field(path: str, change: dict[str, object], param: str) -> None:
    llm = FakeLLM()
    client = Client(llm)
    valid = CHAT if path == CHAT_PATH else TEXT
    reply = await client.post(path, valid | change)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert reply.error["param"] == param
    assert param in reply.error["message"]
    assert not llm.calls
    assert (await client.post(path, valid)).status == 200  # the server serves on


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize(
    "change",
    [
        {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True},
        {"something_new": {"a": [1]}},
        {"bad_words": [], "suffix": None, "echo": False, "use_beam_search": False},
        {"response_format": {"type": "text"}},
        {
            "temperature": None,
            "n": None,
            "stop": None,
            "logit_bias": None,
            "stream": None,
            "max_tokens": None,
        },
        {"model": None},
        {"model": ""},
        {"model": "also-small"},
        {"best_of": 1},
        {
            "max_tokens": 16.0,
            "seed": 5.0,
            "stop_token_ids": [3.0],
            "temperature": 1,
        },  # JSON has one number type
        {"n": 2, "temperature": 0},
        {"stream": False, "logprob_token_ids": [], "truncation_side": "left"},
    ],
)
async def test_harmless_fields_are_accepted(path: str, change: dict[str, object]) -> None:
    reply = await Client(FakeLLM()).post(path, (CHAT if path == CHAT_PATH else TEXT) | change)
    assert reply.status == 200
    assert reply.json["model"] == "small"


@pytest.mark.parametrize(
    "change",
    [
        {"store": False, "reasoning_effort": "low", "prediction": {"type": "content", "content": "x"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tool_choice": "none", "functions": [], "function_call": "none", "modalities": ["text"]},
        {"verbosity": "medium", "include_reasoning": True, "echo": False},
        {"max_tokens": 63, "max_completion_tokens": None},
    ],
)
async def test_harmless_fields_of_chat_are_accepted(change: dict[str, object]) -> None:
    assert (await Client(FakeLLM()).post(CHAT_PATH, CHAT | change)).status == 200


async def test_every_wrong_field_is_told_at_once() -> None:
    request = {
        "model": 5,
        "messages": [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "user"}],
        "temperature": 3,
        "n": "two",
        "store": True,
    }
    error = (await Client(FakeLLM()).post(CHAT_PATH, request)).error
    for path in ("model", "messages[0].content[0].type", "messages[1].content", "temperature", "n", "store"):
        assert f"{path} must" in error["message"] or f"{path}:" in error["message"]
    assert error["param"] in {"model", "messages[0].content[0].type"}


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
async def test_unknown_model(path: str) -> None:
    request = (CHAT if path == CHAT_PATH else TEXT) | {"model": "large"}
    reply = await Client(FakeLLM()).post(path, request)
    assert reply.status == 404
    assert (reply.error["param"], reply.error["code"]) == ("model", "model_not_found")
    assert "'large'" in reply.error["message"]


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
async def test_prompt_too_long(path: str) -> None:
    words = "word " * 100
    request = {"prompt": words, "messages": [{"role": "user", "content": words}]}
    reply = await Client(FakeLLM()).post(path, request)
    assert reply.status == 400
    field = "messages" if path == CHAT_PATH else "prompt"
    assert (reply.error["param"], reply.error["code"]) == (field, "context_length_exceeded")


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nothing", b'{"a": NaN}', b'"\xff"', b"[" * 100_000, b"[]", b"5", b"null", b'{"n": 1e999}'],
)
async def test_invalid_json(path: str, body: bytes) -> None:
    reply = await Client(FakeLLM()).post(path, body)
    assert (reply.status, reply.error["type"], reply.error["param"]) == (400, "invalid_request_error", None)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_wrong_content_type(content_type: str) -> None:
    client = Client(FakeLLM())
    reply = await client.post(TEXT_PATH, TEXT, content_type=content_type)
    assert (reply.status, reply.error["code"]) == (400, "unsupported_content_type")


async def test_content_type_with_charset() -> None:
    client = Client(FakeLLM())
    assert (await client.post(TEXT_PATH, TEXT, content_type="application/json; charset=utf-8")).status == 200


async def test_body_too_large() -> None:
    client = Client(FakeLLM(), ServerArgs(max_body_size=1000))
    reply = await client.post(TEXT_PATH, {"prompt": "x" * 1000})
    assert (reply.status, reply.error["type"]) == (413, "invalid_request_error")
    assert "1000 bytes" in reply.error["message"]
    assert (await client.post(TEXT_PATH, TEXT)).status == 200


async def test_a_body_of_20_mb_is_too_large_by_default() -> None:
    assert (await Client(FakeLLM()).post(TEXT_PATH, b"x" * 20_000_000)).status == 413


async def test_unknown_path_and_wrong_method() -> None:
    client = Client(FakeLLM())
    reply = await client.get("/v1/nothing")
    assert (reply.status, reply.error["type"]) == (404, "invalid_request_error")
    assert "GET /v1/nothing" in reply.error["message"]
    reply = await client.get(TEXT_PATH)
    assert reply.status == 405
    assert "POST" in reply.headers["allow"]
    assert (await client.post("/v1/models", {})).status == 405


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", CHAT_PATH),
        ("GET", f"{CHAT_PATH}/chatcmpl-1"),
        ("POST", f"{CHAT_PATH}/chatcmpl-1"),
        ("DELETE", f"{CHAT_PATH}/chatcmpl-1"),
        ("GET", f"{CHAT_PATH}/chatcmpl-1/messages"),
    ],
)
async def test_stored_completions_are_refused_with_the_reason(method: str, path: str) -> None:
    client = Client(FakeLLM())
    reply = await client.call(method, path, b"{}", {"content-type": "application/json"})
    assert (reply.status, reply.error["code"]) == (404, "completions_not_stored")
    assert "store" in reply.error["message"]
    assert ("chatcmpl-1" in reply.error["message"]) == (path != CHAT_PATH)


async def test_unknown_fields_are_logged_at_debug_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="trioserve.server")
    await Client(FakeLLM()).post(TEXT_PATH, TEXT | {"something_new": 1, "user": "known and harmless"})
    (record,) = [record for record in caplog.records if record.name == "trioserve.server"]
    assert record.levelno == logging.DEBUG
    assert "something_new" in record.getMessage()
    assert "user" not in record.getMessage()


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_early_error_is_a_status_even_for_streams(path: str, stream: bool) -> None:
    words = "word " * 100
    request = {"prompt": words, "messages": [{"role": "user", "content": words}], "stream": stream}
    reply = await Client(FakeLLM()).post(path, json.dumps(request).encode())
    assert reply.status == 400
    assert reply.headers["content-type"] == "application/json"
