"""Anthropic's API, tokens and renderings on the real server and the real model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from helpers_anthropic import PATH, accumulate, without_ids
from served import MODEL

if TYPE_CHECKING:
    from served import ServedModel

QUESTION = {"role": "user", "content": "What is the capital of Japan?"}
REQUEST: dict[str, Any] = {"model": MODEL, "messages": [QUESTION], "max_tokens": 24, "temperature": 0}
CHAT = {"messages": [QUESTION], "max_tokens": 24, "temperature": 0}


def post(server: ServedModel, path: str, body: Any) -> Any:
    status, answer = server.request("POST", path, body)
    assert status == 200, answer
    return answer


def test_a_message_is_what_a_chat_completion_says(server: ServedModel) -> None:
    message = post(server, PATH, REQUEST)
    (block,) = message["content"]
    chat = post(server, "/v1/chat/completions", CHAT)
    assert "Tokyo" in block["text"]
    assert block["text"] == chat["choices"][0]["message"]["content"]
    assert message["stop_reason"] == "end_turn"
    usage = message["usage"]
    prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert prompt_tokens == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]


def test_its_stream_says_the_same(server: ServedModel) -> None:
    message = post(server, PATH, REQUEST)
    streamed = accumulate(post(server, PATH, {**REQUEST, "stream": True}).encode())
    for told in (message, streamed):
        del told["usage"]  # how much of the prompt was cached depends on what came before
    assert without_ids(streamed) == without_ids(message)


def test_a_stop_sequence_is_told(server: ServedModel) -> None:
    for stream in (False, True):
        answer = post(server, PATH, {**REQUEST, "stop_sequences": ["!", "Tokyo"], "stream": stream})
        message = accumulate(answer.encode()) if stream else answer
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "Tokyo")
        assert "Tokyo" not in message["content"][0]["text"]


def test_an_answer_goes_on_with_its_beginning(server: ServedModel) -> None:
    begun = [QUESTION, {"role": "assistant", "content": "The capital of Japan is"}]
    message = post(server, PATH, {**REQUEST, "messages": begun})
    assert message["content"][0]["text"].startswith(" Tokyo")


def test_tokens_are_counted_as_they_are_used(server: ServedModel) -> None:
    counted = post(server, f"{PATH}/count_tokens", {"model": MODEL, "messages": [QUESTION]})
    chat = post(server, "/v1/chat/completions", CHAT)
    assert counted["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_tokens_and_renderings_give_what_the_chat_gives(server: ServedModel) -> None:
    rendered = post(server, "/v1/chat/completions/render", CHAT)
    tokenized = post(server, "/tokenize", {"messages": [QUESTION]})
    assert tokenized["tokens"] == rendered["token_ids"]
    generated = post(server, "/inference/v1/generate", rendered)["choices"][0]["token_ids"]
    text = post(server, "/detokenize", {"tokens": generated})["prompt"]
    chat = post(server, "/v1/chat/completions", {**CHAT, "return_token_ids": True})["choices"][0]
    assert generated == chat["token_ids"]
    assert text.removesuffix("<|im_end|>") == chat["message"]["content"]
