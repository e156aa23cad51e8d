"""Errors as the client's own classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from endpoint import Endpoint

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def test_a_wrong_field(talker: openai.OpenAI, text: Endpoint) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        talker.chat.completions.create(model=text.model, messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    assert "temperature" in caught.value.message
    assert caught.value.request_id


def test_a_wrong_field_of_a_stream(talker: openai.OpenAI, text: Endpoint) -> None:
    with pytest.raises(openai.BadRequestError):
        talker.chat.completions.create(model=text.model, messages=HELLO, temperature=-1, stream=True)


def test_a_path_of_a_wrong_field(talker: openai.OpenAI, text: Endpoint) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text"}]}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\]"):
        talker.chat.completions.create(model=text.model, messages=messages)


def test_a_model_that_is_not_there(talker: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        talker.chat.completions.create(model="none", messages=HELLO)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        talker.models.retrieve("none")


def test_a_wrong_key(text: Endpoint) -> None:
    with (
        openai.OpenAI(base_url=text.api, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_an_error_inside_a_stream(talker: openai.OpenAI, text: Endpoint) -> None:
    """The deadline passes when a part of the answer is there."""
    stream = talker.chat.completions.create(
        model=text.model, messages=HELLO, stream=True, max_tokens=4000,
        extra_body={"timeout": 3, "ignore_eos": True},
    )  # fmt: skip
    chunks = []
    with pytest.raises(openai.APIError) as caught:
        chunks.extend(stream)
    assert chunks
    assert not isinstance(caught.value, openai.APIStatusError)
    assert caught.value.code == "deadline_exceeded"


def test_a_deadline_before_the_answer(talker: openai.OpenAI, text: Endpoint) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        talker.chat.completions.create(
            model=text.model, messages=HELLO, max_tokens=4000, extra_body={"timeout": 1, "ignore_eos": True}
        )
    assert caught.value.status_code == 504
