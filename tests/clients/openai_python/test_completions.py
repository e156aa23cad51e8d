"""The older API of completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from endpoint import Endpoint


@pytest.fixture
def talker(text: Endpoint) -> Iterator[openai.OpenAI]:
    """Not strict: the client's types have no null for a chunk's finish reason and for the first token's
    log-probability, where OpenAI's servers have it."""
    with openai.OpenAI(base_url=text.api, api_key=text.key, max_retries=0) as client:
        yield client


def ask(endpoint: Endpoint, **more: Any) -> dict[str, Any]:
    return {
        "model": endpoint.model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8,
    } | more  # fmt: skip


def test_create_and_stream(talker: openai.OpenAI, text: Endpoint) -> None:
    whole = talker.completions.create(**ask(text))
    assert "Paris" in whole.choices[0].text
    with talker.completions.create(
        **ask(text, stream=True, stream_options={"include_usage": True})
    ) as stream:
        *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_prompts_in_a_list_and_as_tokens(talker: openai.OpenAI, text: Endpoint) -> None:
    answer = talker.completions.create(**ask(text, prompt=["One, two,", "Red, green,"], n=2, temperature=1.0))
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    tokens = talker.completions.create(**ask(text, prompt=[504, 3575], max_tokens=2))
    assert tokens.usage.prompt_tokens == 2


def test_echo_and_logprobs_line_up(talker: openai.OpenAI, text: Endpoint) -> None:
    answer = talker.completions.create(**ask(text, echo=True, logprobs=2, max_tokens=2))
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == answer.usage.total_tokens
    assert "".join(logprobs.tokens) == choice.text
    assert [
        choice.text[offset:].startswith(token)
        for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)
    ] == [True] * len(logprobs.tokens)
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


def test_a_text_is_filled_in(caller: openai.OpenAI, tools: Endpoint) -> None:
    answer = caller.completions.create(
        **ask(tools, prompt="def add(a, b):\n    return ", suffix="\n\nprint(add(1, 2))\n")
    )
    assert "a + b" in answer.choices[0].text
