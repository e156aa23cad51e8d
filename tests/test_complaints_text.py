"""Complaints 21 to 24: stop strings, held-back text, characters of many bytes, logprobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from trio.testing import wait_all_tasks_blocked

from helpers_complaints import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    QUESTION,
    ask_together,
    choices_of,
    http_request,
    parse_events,
    text_of,
    until,
)
from helpers_http import serving
from trioserve.outputs import FinishReason
from trioserve.server.app import create_app

if TYPE_CHECKING:
    from fake_engine import FakeEngine
    from served import ServedModel

STORY: dict[str, Any] = {**GREEDY, "prompt": "Once upon a time", "max_tokens": 24}
FACES = "\U0001fae0\U0001f979\u9f9c"  # three of many tokens each
REPLACEMENT = "\ufffd"


def whole_and_streamed(server: ServedModel, path: str, *asked: dict[str, Any]) -> list[tuple[Any, list[Any]]]:
    """The choice of each answer in one piece, and the events of the same as a stream."""
    answers = ask_together(
        server, *((path, {**body, "stream": stream}) for body in asked for stream in (False, True))
    )
    return [
        (answer["choices"][0], events) for answer, events in zip(answers[::2], answers[1::2], strict=True)
    ]


def ends(events: list[Any]) -> tuple[str, str]:
    """Text and reason."""
    return text_of(events), choices_of(events)[-1]["finish_reason"]


@pytest.fixture(scope="module")
def story(server: ServedModel) -> tuple[str, list[str]]:
    """A text, and its tokens."""
    (answer,) = ask_together(server, (COMPLETIONS, {**STORY, "logprobs": 0}))
    (choice,) = answer["choices"]
    tokens = choice["logprobs"]["tokens"]
    assert "".join(tokens) == choice["text"]
    return choice["text"], tokens


# Complaint 21: no part of a stop string leaks; one over two tokens is found; streamed = not streamed


def test_complaint_21_a_stop_string_over_two_tokens(
    server: ServedModel, story: tuple[str, list[str]]
) -> None:
    text, tokens = story
    asked, expected = [], []
    for position, include in [(3, False), (9, False), (9, True), (16, False)]:
        before = sum(map(len, tokens[:position]))
        stop = text[before - 2 : before + 2]
        asked.append({**STORY, "stop": [stop, "never said"], "include_stop_str_in_output": include})
        expected.append(text[: text.index(stop) + len(stop) * include])
    answers = whole_and_streamed(server, COMPLETIONS, *asked)
    for (choice, events), body, said in zip(answers, asked, expected, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (said, "stop")
        assert choice["stop_reason"] == body["stop"][0]
        assert ends(events) == (said, "stop")


def test_complaint_21_in_a_chat_too(server: ServedModel) -> None:
    ((whole, _), (choice, events)) = whole_and_streamed(
        server, CHAT, {"messages": QUESTION}, {"messages": QUESTION, "stop": "Tokyo"}
    )
    text = whole["message"]["content"]
    expected = text[: text.index("Tokyo")]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "stop")
    assert ends(events) == (expected, "stop")


# Complaint 22: held-back text that was not a stop is flushed at the end


def test_complaint_22_held_back_text_comes_out_at_the_end(
    server: ServedModel, story: tuple[str, list[str]]
) -> None:
    _, tokens = story
    cuts = ["".join(tokens[:length]) for length in range(5, 14)]
    asked = [  # the text's end is the beginning of a stop string
        {**STORY, "stop": [cut[-length:] + "\u2620"], "max_tokens": length + 4}
        for length, cut in enumerate(cuts, 1)
    ]
    for (choice, events), cut in zip(whole_and_streamed(server, COMPLETIONS, *asked), cuts, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (cut, "length")
        assert ends(events) == (cut, "length")


# Complaint 23: characters of many bytes are never split


@pytest.mark.parametrize("num_per_step", [1, 2, 3, 5, 7])
async def test_complaint_23_characters_that_come_byte_by_byte(fake: FakeEngine, num_per_step: int) -> None:
    expected = f"a{FACES}é{FACES}"
    data = expected.encode()
    steps = [data[begin : begin + num_per_step] for begin in range(0, len(data), num_per_step)]
    async with serving(create_app(fake.llm)) as server:
        client = await server.connect()
        await client.send(http_request(COMPLETIONS, {"prompt": "Hi", "max_tokens": 60, "stream": True}))
        await until(lambda: fake.client.added)
        for step in steps:
            fake.client.emit(fake.client.added[0], step)
            await wait_all_tasks_blocked()
        fake.client.emit(fake.client.added[0], b"", FinishReason.LENGTH)
        events = parse_events((await client.read_reply()).body.decode())
    texts = [choice["text"] for choice in choices_of(events)]
    assert not any(REPLACEMENT in text for text in texts)
    assert "".join(texts) == expected
    assert len(texts) > 3, "they come one by one"


def test_complaint_23_a_text_cut_within_a_character(server: ServedModel) -> None:
    asked = [
        {"messages": QUESTION, "structured_outputs": {"choice": [FACES]}, "max_tokens": max_tokens}
        for max_tokens in range(1, 13)
    ]
    for choice, events in whole_and_streamed(server, CHAT, *asked):
        content = choice["message"]["content"]
        assert text_of(events) == content
        *others, _ = [piece["delta"].get("content") or "" for piece in choices_of(events)]
        assert not any(REPLACEMENT in text for text in others)
        assert FACES.startswith(content.rstrip(REPLACEMENT))
    assert content == FACES


# Complaint 24: streamed logprobs equal the others, one per token, with the right bytes


@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("form", [None, {"choice": [f"Well {FACES}."]}], ids=["plain", "faces"])
def test_complaint_24_streamed_logprobs_of_a_chat(server: ServedModel, num_top: int, form: Any) -> None:
    asked = {
        "messages": QUESTION,
        "logprobs": True,
        "top_logprobs": num_top,
        "structured_outputs": form,
        "return_token_ids": True,
    }
    ((choice, events),) = whole_and_streamed(server, CHAT, asked)
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"])
    said = b"".join(bytes(token["bytes"]) for token in content)
    assert said.decode().removesuffix("<|im_end|>") == choice["message"]["content"]
    for token in content:
        assert token["token"] == bytes(token["bytes"]).decode(errors="replace")
        assert len(token["top_logprobs"]) == num_top
        assert token["logprob"] <= 0
    chunks = [chunk["logprobs"]["content"] for chunk in choices_of(events) if chunk["logprobs"]]
    streamed = [token for chunk in chunks for token in chunk]
    assert streamed == nearly(content)


@pytest.mark.parametrize("num_top", [0, 2])
def test_complaint_24_streamed_logprobs_of_a_completion(server: ServedModel, num_top: int) -> None:
    asked = {**STORY, "logprobs": num_top, "max_tokens": 8}
    ((choice, events),) = whole_and_streamed(server, COMPLETIONS, asked)
    expected = choice["logprobs"]
    chunks = [piece["logprobs"] for piece in choices_of(events)]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [item for chunk in chunks if chunk for item in chunk[field] or ()]
        assert streamed == nearly(expected[field] or []), field
    assert len(expected["token_logprobs"]) == 8


def nearly(value: Any) -> Any:
    """The last bits of a logprob depend on what runs beside it."""
    match value:
        case float():
            return pytest.approx(value, abs=1e-3)
        case list():
            return [nearly(item) for item in value]
        case dict():
            return {key: nearly(item) for key, item in value.items()}
    return value
