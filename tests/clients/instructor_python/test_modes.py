"""instructor, in each of its ways to get an object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import instructor
import openai
import pytest
from pydantic import BaseModel
from weather import PERSON_QUESTION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from endpoint import Endpoint

MODES = [
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.MD_JSON,
]


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
def client(tools: Endpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tools.api, api_key=tools.key, max_retries=0) as client:
        yield client


def ask(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": PERSON_QUESTION}],
        "temperature": 0,
        "max_tokens": 96,
        "max_retries": 0,
    }


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_an_object(client: openai.OpenAI, tools: Endpoint, mode: instructor.Mode) -> None:
    patched = instructor.from_openai(client, mode=mode)
    person = patched.chat.completions.create(**ask(tools), response_model=Person)
    assert person.model_dump() == {"name": "Bob", "age": 42}


@pytest.mark.parametrize("mode", MODES[:4], ids=lambda mode: mode.name)
def test_an_object_as_it_comes(client: openai.OpenAI, tools: Endpoint, mode: instructor.Mode) -> None:
    patched = instructor.from_openai(client, mode=mode)
    *some, last = patched.chat.completions.create_partial(**ask(tools), response_model=Person)
    assert (last.name, last.age) == ("Bob", 42)
    assert some


def test_a_list_of_objects(client: openai.OpenAI, tools: Endpoint) -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    people = list(patched.chat.completions.create_iterable(**ask(tools), response_model=Person))
    assert {"name": "Bob", "age": 42} in [person.model_dump() for person in people]
