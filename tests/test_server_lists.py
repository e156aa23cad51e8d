"""Long lists of a body: taken as they are where they are right, and given up on where they are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trioserve.errors import InvalidRequestError
from trioserve.server.protocol.readers import CHAT_READER, COMPLETION_READER

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([1.0, 2, 3.0], [1, 2, 3]),
        ([[1, 2.0], []], [[1, 2], []]),
        (["a", "b"], ["a", "b"]),
        ([1] * 3000, [1] * 3000),  # not so many prompts, but one
    ],
)
def test_right_ones(prompt: Any, expected: Any) -> None:
    read = COMPLETION_READER.read(json.dumps({"prompt": prompt}).encode()).prompt
    assert read == expected
    assert {type(item) for item in read} == {type(item) for item in expected}


@pytest.mark.parametrize(
    ("field", "value", "first", "last"),
    [
        ("stop_token_ids", [1] + ["a"] * 1000, "stop_token_ids[1] must be an integer, got 'a'.", 10),
        ("stop_token_ids", [1, True, 2.5], "stop_token_ids[1] must be an integer, got True.", 2),
        ("messages", [1] * 1000, "messages[0] must be an object, got 1.", 9),
        ("documents", [{}, 1], "documents[1] must be an object, got 1.", 1),
        ("logit_bias", {str(n): "a" for n in range(1000)}, "logit_bias[0] must be a number, got 'a'.", 9),
    ],
)
def test_of_wrong_ones_the_first_few_are_told(field: str, value: Any, first: str, last: int) -> None:
    body = {"messages": MESSAGES, field: value}
    with pytest.raises(InvalidRequestError) as caught:
        CHAT_READER.read(json.dumps(body).encode())
    assert str(caught.value).startswith(first)
    assert f"{field}[{last}]" in str(caught.value)
    assert f"{field}[{last + 1}]" not in str(caught.value)


@pytest.mark.parametrize("value", ["a", 5, {"0": 1}])
def test_what_is_no_list_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="stop_token_ids must be a list, got "):
        CHAT_READER.read(json.dumps({"messages": MESSAGES, "stop_token_ids": value}).encode())


@pytest.mark.parametrize("prompt", ["a", []])
def test_too_many_prompts_are_not_looked_at(prompt: Any) -> None:
    """Else the second one would be wrong, too."""
    with pytest.raises(InvalidRequestError) as caught:
        COMPLETION_READER.read(json.dumps({"prompt": [prompt, None] + [prompt] * 2047}).encode())
    assert str(caught.value) == "prompt must hold at most 2048 prompts, got 2049."
