"""Compiling beside the step loop: caching, sharing, cancelling, and grammars that are an attack."""

from __future__ import annotations

import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio

from helpers_grammars import accepts, allowed_tokens, smollm2, walk_into_failure
from trioserve.config import StructuredOutputsConfig
from trioserve.errors import EngineGenerateError, InvalidRequestError
from trioserve.link import grammar_compiler
from trioserve.link.grammar_compiler import GrammarCompiler
from trioserve.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


def wanted(**params: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**params)


DIGITS = wanted(regex="[0-9]+")
BUSY = wanted(json={"type": "integer", "multipleOf": 10000019})
"""Minutes of work for the compiler."""


def chained(kind: Callable[[str], Any], length: int) -> dict[str, Any]:
    """Definitions, each of which refers to the next: a few hundred kB that overflow the stack."""
    definitions = {f"d{number}": kind(f"#/$defs/d{number + 1}") for number in range(length)}
    return {"$defs": {**definitions, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


@asynccontextmanager
async def compiler(**config: Any) -> AsyncIterator[GrammarCompiler]:
    settings = StructuredOutputsConfig(**{"compile_timeout": 60, **config})
    async with GrammarCompiler.open(smollm2(), settings) as opened:
        yield opened


async def test_a_grammar_is_compiled_once() -> None:
    async with compiler() as grammars:
        assert grammars.try_get(DIGITS) is None
        assert accepts(await grammars.compile(DIGITS), "42")  # type: ignore[arg-type]
        again = grammars.try_get(wanted(regex="[0-9]+"))
        assert again is not None
        assert accepts(again, "7")  # type: ignore[arg-type]
        assert grammars.try_get(wanted(regex="[0-9]")) is None


async def test_a_refusal_is_remembered() -> None:
    bad = wanted(regex="a(b")
    async with compiler() as grammars:
        with pytest.raises(InvalidRequestError, match="unclosed group") as caught:
            await grammars.compile(bad)
        assert caught.value.parameter == "structured_outputs"
        with pytest.raises(InvalidRequestError, match="unclosed group"):
            grammars.try_get(bad)
        assert await grammars.compile(DIGITS)


async def test_the_least_recently_used_is_dropped() -> None:
    first, second, third = (wanted(choice=[name]) for name in ("one", "two", "three"))
    async with compiler(cache_size=2) as grammars:
        await grammars.compile(first)
        await grammars.compile(second)
        grammars.try_get(first)
        await grammars.compile(third)
        assert grammars.try_get(first) is not None
        assert grammars.try_get(second) is None
        assert grammars.try_get(third) is not None


@attrs.define
class CountedCompilations:
    """Stands in front of `compile_grammar`."""

    count: int = 0
    original: Any = grammar_compiler.compile_grammar

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self.original(*args)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> CountedCompilations:
    counted = CountedCompilations()
    monkeypatch.setattr(grammar_compiler, "compile_grammar", counted)
    return counted


async def test_requests_for_the_same_grammar_share_the_work(compilations: CountedCompilations) -> None:
    matchers = []

    async def ask() -> None:
        matchers.append(await grammars.compile(DIGITS))

    async with compiler() as grammars, trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(ask)
    assert compilations.count == 1
    assert len({id(matcher) for matcher in matchers}) == 8
    matchers[0].advance([2])
    assert all(len(allowed_tokens(matcher)) > 5 for matcher in matchers[1:])


async def test_who_leaves_does_not_disturb_who_stays(compilations: CountedCompilations) -> None:
    async with compiler() as grammars:
        async with trio.open_nursery() as nursery:
            leaving = trio.CancelScope()

            async def leave() -> None:
                with leaving:
                    await grammars.compile(DIGITS)

            nursery.start_soon(leave)
            nursery.start_soon(grammars.compile, DIGITS)
            await trio.testing.wait_all_tasks_blocked()
            leaving.cancel()
        assert leaving.cancelled_caught
        assert grammars.try_get(DIGITS) is not None
        assert compilations.count == 1


async def test_nothing_is_compiled_for_nobody(compilations: CountedCompilations) -> None:
    other = wanted(choice=["x"])
    async with compiler() as grammars:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(grammars.compile, DIGITS)
            await trio.testing.wait_all_tasks_blocked()
            with trio.CancelScope() as gone:
                gone.cancel()
                await grammars.compile(other)
        await grammars.compile(wanted(choice=["y"]))  # its turn comes after the abandoned one's
        assert grammars.try_get(other) is None
        assert compilations.count == 2


async def test_a_grammar_that_does_not_come_to_an_end() -> None:
    async with compiler(compile_timeout=0.5) as grammars:
        with pytest.raises(InvalidRequestError, match=r"0\.5 seconds .*compile_timeout"):
            await grammars.compile(BUSY)
        with pytest.raises(InvalidRequestError, match="compile_timeout"):
            grammars.try_get(BUSY)


async def test_leaving_does_not_wait_for_a_busy_child() -> None:
    with trio.fail_after(30):
        async with compiler(compile_timeout=1000) as grammars:
            await grammars.compile(DIGITS)
            with trio.move_on_after(0.2):
                await grammars.compile(BUSY)


def rules(name: str, body: str, length: int) -> str:
    """A chain of rules in Lark's notation."""
    lines = [f"{name}{number}: {body.format(f'{name}{number + 1}')}" for number in range(length)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{length}: "b"', ""])


ATTACKS = {
    "references that overflow the stack": wanted(json=chained(lambda ref: {"$ref": ref}, 15000)),
    "alternatives that overflow it": wanted(
        json=chained(lambda ref: {"anyOf": [{"type": "null"}, {"$ref": ref}]}, 10000)
    ),
    "rules that overflow it": wanted(grammar=rules("r", '"a" {}', 30000)),
    "nested groups": wanted(regex="(" * 20000 + "a" + ")" * 20000),
    "nested groups in GBNF": wanted(grammar="root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "a long repetition": wanted(regex="x{1000000}"),
    "nested repetitions": wanted(regex="(((x{100}){100}){100})"),
    "ambiguous repetitions": wanted(regex="a?" * 1000 + "a" * 1000),
    "repetitions of classes": wanted(regex=r"(\w{1,50}\s?){1,500}"),
    "a long regex": wanted(regex="ab?" * 200000),
    "a long choice": wanted(choice=["ab" * 300000]),
    "a product of alternatives": wanted(
        json={"allOf": [{"anyOf": [{"required": [f"{p}{k}"]} for p in "pq"]} for k in range(25)]}
    ),
    "an intersection of patterns": wanted(
        json={"type": "string", "allOf": [{"pattern": f"(.*{c}){{9}}"} for c in "abcdefghij"]}
    ),
    "an intersection of terminals": wanted(
        grammar="start: A\nA: /(.*a.{20})/ & ~/(.*b.{18}c)/ & /(.*d.{15})/\n"
    ),
    "a large divisor": wanted(json={"type": "integer", "multipleOf": 2147483647}),
    "many properties": wanted(
        json={"type": "object", "properties": {f"p{k}": {"type": "string"} for k in range(20000)}}
    ),
    "ambiguous rules": wanted(grammar='start: a a a a a a\na: b*\nb: c*\nc: /[a-z ]/ | "" | a\n'),
    "terminals that double": wanted(grammar=rules("R", "{0} {0}", 30)),
    "no way back": wanted(grammar="start: a\na[max_tokens=5]: /[a-z ]*/\n"),
    "its size": wanted(regex="é" * 524250),
}

HARMLESS = {
    "repetitions": wanted(regex="(a|aa){1,200}b.*c{500}"),
    "an exponential automaton": wanted(regex="[ab]*a[ab]{400}"),
    "many stars": wanted(regex="(.*a){30}"),
    "a least length": wanted(json={"type": "string", "minLength": 10**6}),
    "a greatest length": wanted(json={"type": "string", "maxLength": 10**6}),
    "many items": wanted(json={"type": "array", "items": {"type": "integer"}, "minItems": 10**4}),
    "many values": wanted(json={"enum": [f"value {k}" for k in range(20000)]}),
    "many optional properties": wanted(
        json={"type": "object", "properties": {f"p{k}": {"type": "integer"} for k in range(400)}}
    ),
    "references": wanted(
        json=chained(lambda ref: {"type": "object", "properties": {"a": {"$ref": ref}}}, 40)
    ),
    "many tools": wanted(
        json={
            "anyOf": [
                {"type": "object", "properties": {"name": {"const": f"tool_{k}"}}, "required": ["name"]}
                for k in range(200)
            ]
        }
    ),
}


async def refusal(grammars: GrammarCompiler, params: StructuredOutputsParams) -> InvalidRequestError | None:
    try:
        await grammars.compile(params)
    except InvalidRequestError as error:
        return error
    return None


async def test_an_attack_is_the_attackers_refusal() -> None:
    async with compiler() as grammars:
        for name, params in ATTACKS.items():
            error = await refusal(grammars, params)
            assert error is not None, name
            assert error.parameter == "structured_outputs", name
            assert len(str(error)) < 500, name


async def test_what_looks_bad_and_is_harmless() -> None:
    async with compiler() as grammars:
        for name, params in HARMLESS.items():
            assert (await grammars.compile(params)).failure is None, name


async def test_after_a_crash_the_next_grammar_is_compiled() -> None:
    async with compiler() as grammars:
        with pytest.raises(InvalidRequestError, match="crash"):
            await grammars.compile(wanted(json=chained(lambda ref: {"$ref": ref}, 15000)))
        assert await grammars.compile(DIGITS)


async def test_a_spoiled_grammar_is_compiled_again(compilations: CountedCompilations) -> None:
    params = wanted(regex="[a-z]{400}(x{1000}){1000}")  # its first masks are harmless
    async with compiler() as grammars:
        matcher = await grammars.compile(params)
        assert walk_into_failure(matcher, 500) is not None  # type: ignore[arg-type]
        assert grammars.try_get(params) is None
        assert (await grammars.compile(params)).failure is None
    assert compilations.count == 2


async def test_a_tokenizer_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    model = attrs.evolve(smollm2(), tokenizer_directory=str(tmp_path))
    async with GrammarCompiler.open(model, StructuredOutputsConfig()) as grammars:
        with pytest.raises(InvalidRequestError, match=r"tokenizer\.json") as caught:
            grammars.try_get(DIGITS)
        assert caught.value.parameter == "structured_outputs"


async def test_a_child_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async with compiler() as grammars:
        monkeypatch.setattr("sys.executable", "/bin/false")
        with pytest.raises(EngineGenerateError, match="exit code 1"):
            await grammars.compile(DIGITS)
        monkeypatch.undo()
        assert await grammars.compile(DIGITS)


async def test_a_process_that_cannot_be_made_is_one_requests_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError("too many processes")

    async with compiler() as grammars:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", fail)
            with pytest.raises(EngineGenerateError, match="did not start: too many processes"):
                await grammars.compile(DIGITS)
        assert await grammars.compile(DIGITS)
