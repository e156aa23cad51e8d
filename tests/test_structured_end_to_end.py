"""The form of an output, asked for through the real server: 206 schemas, other grammars, an attack."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import openai
import pytest
from tokenizers import Tokenizer

from helpers_model_sources import packaged_model
from json_schemas import ACCEPTED, assert_valid
from served import MODEL, STEADY, ServedModel, served

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

T = TypeVar("T")

AT_A_TIME = 32
CATASTROPHES = {
    "an intersection of patterns": {
        "type": "string",
        "allOf": [{"pattern": f"(.*{letter}){{9}}"} for letter in "abcdefghij"],
    },
    "ambiguous repetitions": {"type": "string", "pattern": "^" + "a?" * 1000 + "a" * 1000 + "$"},
    "minutes of work": {"type": "integer", "multipleOf": 10000019},
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTION: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me about a person."}],
    "temperature": 0.8,
    "seed": 5,
    "max_tokens": 64,
}
LARK = """start: "The " ANIMAL " is " NUMBER " years old."
ANIMAL: "dog" | "cat" | "horse"
NUMBER: /[1-9][0-9]?/
"""
GBNF = """root ::= "[" item ("," item){0,2} "]"
item ::= "yes" | "no"
"""


@pytest.fixture(scope="module")
def terse_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """Writes JSON without white space: left the choice, so small a model fills pages with it."""
    flags = ["--dtype", STEADY, "--structured-outputs-config.disable_any_whitespace"]
    with served(tmp_path_factory.mktemp("server"), flags) as running:
        yield running
        running.wait_until_idle()
        assert running.terminate() == 0, running.log
        assert "Traceback" not in running.log, running.log


@pytest.fixture(scope="module")
def bias() -> Mapping[str, float]:
    """Towards what closes a value: left alone, so small a model writes numbers without end."""
    tokenizer = Tokenizer.from_file(f"{packaged_model(MODEL).tokenizer_directory}/tokenizer.json")
    closing = ['"', "}", "]", '"}', '"]', "}}", "<|im_end|>"]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in closing]
    return {str(token): 5.0 for (token,) in ids}


@pytest.fixture
def client(terse_server: ServedModel) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{terse_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def ask(client: openai.OpenAI | openai.AsyncOpenAI, **changes: Any) -> Any:
    return client.chat.completions.create(**{**QUESTION, **changes})


def run_with_client(server: ServedModel, work: Callable[[openai.AsyncOpenAI], Awaitable[T]]) -> T:
    async def main() -> T:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await work(client)

    return asyncio.run(main())


def answers(server: ServedModel, forms: Mapping[str, dict[str, Any]], **params: Any) -> dict[str, Any]:
    """The choice by name of a form."""

    async def ask_all(client: openai.AsyncOpenAI) -> list[Any]:
        slots = asyncio.Semaphore(AT_A_TIME)

        async def ask_one(number: int, name: str) -> Any:
            messages = [{"role": "user", "content": f"Make up an example of: {name}"}]
            async with slots:
                return await ask(client, messages=messages, seed=number, **params, **forms[name])

        return await asyncio.gather(*(ask_one(number, name) for number, name in enumerate(forms)))

    completions = run_with_client(server, ask_all)
    return {name: answer.choices[0] for name, answer in zip(forms, completions, strict=True)}


def check(choices: Mapping[str, Any], *, least_share: float) -> None:
    """The completed ones are valid, and at least that share of all."""
    assert {choice.finish_reason for choice in choices.values()} <= {"stop", "length"}
    completed = {name: choice for name, choice in choices.items() if choice.finish_reason == "stop"}
    for name, choice in completed.items():
        assert_valid(choice.message.content, ACCEPTED[name])
    assert len(completed) >= least_share * len(choices)


def test_every_completed_output_validates(terse_server: ServedModel, bias: Mapping[str, float]) -> None:
    forms = {name: {"response_format": json_schema(schema)} for name, schema in ACCEPTED.items()}
    check(answers(terse_server, forms, logit_bias=bias), least_share=0.9)


def test_so_do_those_with_white_space(server: ServedModel, bias: Mapping[str, float]) -> None:
    names = [name for name in ACCEPTED if name.startswith("tool")][::2]
    forms = {name: {"extra_body": {"structured_outputs": {"json": ACCEPTED[name]}}} for name in names}
    check(answers(server, forms, logit_bias=bias), least_share=0.5)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"regex": r"[A-Z][a-z]{2,8}, born in (19|20)[0-9]{2}"}, r"[A-Z][a-z]{2,8}, born in (19|20)[0-9]{2}"),
        ({"choice": ["a teacher", "a teacher of music", "a doctor"]}, r"a teacher( of music)?|a doctor"),
        ({"grammar": LARK}, r"The (dog|cat|horse) is [1-9][0-9]? years old\."),
        ({"grammar": GBNF}, r"\[(yes|no)(,(yes|no)){0,2}\]"),
    ],
    ids=["regex", "choice", "Lark", "GBNF"],
)
def test_other_grammars(client: openai.OpenAI, form: dict[str, Any], expected: str) -> None:
    (choice,) = ask(client, extra_body={"structured_outputs": form}).choices
    assert choice.finish_reason == "stop"
    assert re.fullmatch(expected, choice.message.content)


def test_a_json_object(client: openai.OpenAI, bias: Mapping[str, float]) -> None:
    (choice,) = ask(client, response_format={"type": "json_object"}, logit_bias=bias).choices
    assert choice.finish_reason == "stop"
    assert isinstance(json.loads(choice.message.content), dict)


def test_n_choices_are_all_valid(client: openai.OpenAI) -> None:
    choices = ask(client, n=3, response_format=json_schema(PERSON)).choices
    assert [choice.finish_reason for choice in choices] == ["stop"] * 3
    for choice in choices:
        assert_valid(choice.message.content, PERSON)
    assert len({choice.message.content for choice in choices}) > 1


def test_streamed_is_not_streamed(client: openai.OpenAI) -> None:
    form = json_schema(PERSON)
    (whole,) = ask(client, response_format=form).choices
    with ask(client, response_format=form, stream=True) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert (
        [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [whole.finish_reason] == ["stop"]
    )


class Streams:
    """Endless greedy streams, read together until everyone has gone on for a while after `enough` is set."""

    prompts: ClassVar = [f"Chapter {number}. Once upon a time" for number in range(8)]

    def __init__(self) -> None:
        self.tokens: list[list[int]] = [[] for _ in self.prompts]
        self.begun = asyncio.Event()
        self.enough: int | None = None
        """The number of tokens at which to leave."""

    @property
    def lengths(self) -> list[int]:
        return list(map(len, self.tokens))

    @staticmethod
    def params(**changes: Any) -> dict[str, Any]:
        extra = {"ignore_eos": True, "return_token_ids": True}
        return {"model": MODEL, "temperature": 0, "extra_body": extra, **changes}

    async def read_all(self, client: openai.AsyncOpenAI) -> None:
        await asyncio.gather(*(self._read(client, number) for number in range(len(self.prompts))))

    async def _read(self, client: openai.AsyncOpenAI, number: int) -> None:
        prompt, tokens = self.prompts[number], self.tokens[number]
        params = self.params(prompt=prompt, max_tokens=4000, stream=True)
        async with await client.completions.create(**params) as stream:
            async for chunk in stream:
                tokens += chunk.choices[0].token_ids
                if all(self.tokens):
                    self.begun.set()
                if self.enough is not None and len(tokens) >= self.enough:
                    return


def test_a_catastrophe_is_its_clients_400_and_nobodys_delay(terse_server: ServedModel) -> None:
    lengths: list[list[int]] = []
    errors: dict[str, openai.BadRequestError] = {}

    async def work(client: openai.AsyncOpenAI) -> Streams:
        streams = Streams()
        reading = asyncio.create_task(streams.read_all(client))
        await streams.begun.wait()
        lengths.append(streams.lengths)
        for name, schema in CATASTROPHES.items():
            try:
                await ask(client, response_format=json_schema(schema))
            except openai.BadRequestError as error:
                errors[name] = error
        lengths.append(streams.lengths)
        streams.enough = max(streams.lengths) + 4
        await reading
        return streams

    streams = run_with_client(terse_server, work)
    assert set(errors) == set(CATASTROPHES)
    assert "compile_timeout" in errors["minutes of work"].message
    # Everyone went on meanwhile, and nobody much slower than the others.
    gained = [after - before for before, after in zip(*lengths, strict=True)]
    assert min(gained) >= 5
    assert 2 * min(gained) >= max(gained)
    # And nothing was lost.
    longest = max(streams.lengths)
    with openai.OpenAI(base_url=f"{terse_server.url}/v1", api_key="none", max_retries=0) as client:
        undisturbed = client.completions.create(**Streams.params(prompt=Streams.prompts, max_tokens=longest))
    for tokens, choice in zip(streams.tokens, undisturbed.choices, strict=True):
        assert tokens == choice.model_dump()["token_ids"][: len(tokens)]
