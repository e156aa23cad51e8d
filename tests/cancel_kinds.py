"""The kinds of requests that a library's user makes. Each runs one and returns its texts."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

from cancel_everywhere import ABORTED, Target
from cancel_worlds import BEAMS, PROMPT, EngineWorld, sampling
from trioserve import FinishReason, RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from trioserve.outputs import RequestOutput

__all__ = ["LIBRARY", "NAMED", "Kind"]


@attrs.frozen
class Kind:
    """A kind of request in a library's hands: it runs in the scope that `Target.here` opens."""

    name: str
    run: Callable[[EngineWorld, Target], Awaitable[object]]
    expected: Callable[[EngineWorld], Awaitable[object]]


class _Texts:
    """What has come so far, by completion."""

    def __init__(self, *, deltas: bool) -> None:
        self._deltas = deltas
        self._texts: dict[int, str] = {}
        self._was_aborted = False

    def take(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            before = self._texts.get(completion.index, "") if self._deltas else ""
            self._texts[completion.index] = before + completion.text
            self._was_aborted = self._was_aborted or completion.finish_reason is FinishReason.ABORT

    @property
    def result(self) -> object:
        return ABORTED if self._was_aborted else [text for _, text in sorted(self._texts.items())]


async def _one_text(world: EngineWorld) -> object:
    return [await world.text(PROMPT)]


async def _three_completions(world: EngineWorld) -> object:
    return [await world.text(PROMPT, seed=seed) for seed in range(3)]


def _named(world: EngineWorld, target: Target) -> dict[str, Any]:
    """A name for the request, by which the target can be aborted."""
    target.abort = partial(world.llm.abort, "mine")
    return {"request_id": "mine"}


async def _complete(world: EngineWorld, target: Target) -> object:
    with target.here():
        texts = _Texts(deltas=False)
        texts.take(await world.llm.complete(PROMPT, sampling(), **_named(world, target)))
        return texts.result
    return None


async def _stream(world: EngineWorld, target: Target, **params: Any) -> object:
    params = {"output_kind": RequestOutputKind.DELTA, **params}
    with target.here():
        texts = _Texts(deltas=params["output_kind"] is RequestOutputKind.DELTA)
        async with world.llm.stream(PROMPT, sampling(**params), **_named(world, target)) as outputs:
            async for output in outputs:
                texts.take(output)
        return texts.result
    return None


def _stream_of(**params: Any) -> Callable[[EngineWorld, Target], Awaitable[object]]:
    return partial(_stream, **params)


async def _closed_generator(world: EngineWorld, target: Target) -> object:
    with target.here():
        texts = _Texts(deltas=False)
        async with aclosing(world.llm.generate(PROMPT, sampling())) as outputs:
            async for output in outputs:
                texts.take(output)
        return texts.result
    return None


async def _abandoned_generator(world: EngineWorld, target: Target) -> object:
    """Left after its first output, and collected: trio closes it then, and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        result = await _begin_a_generator(world.llm.generate, target)
        await wait_all_tasks_blocked()
    return result


async def _begin_a_generator(
    generate: Callable[..., AsyncGenerator[RequestOutput, None]], target: Target
) -> object:
    with target.here():
        async for output in generate(PROMPT, sampling()):
            return len(output.outputs)
    return None


async def _one_output(_: EngineWorld) -> object:
    return 1


async def _submit_and_release(world: EngineWorld, target: Target) -> object:
    with target.here():
        texts = _Texts(deltas=False)
        channel = await world.llm.submit(PROMPT, sampling(), **_named(world, target))
        try:
            while not channel.exhausted:
                texts.take(await channel.take())
        finally:
            world.llm.release(channel)
        return texts.result
    return None


async def _beam_search(world: EngineWorld, target: Target) -> object:
    with target.here():
        found = await world.llm.beam_search(PROMPT, BEAMS)
        return [sequence.output_text for sequence in found.sequences]
    return None


async def _beam_texts(world: EngineWorld) -> object:
    return await world.beams(world.encode(PROMPT))


async def _streaming_input(world: EngineWorld, target: Target) -> object:
    with target.here():
        answers: dict[int, str] = {}  # by the length of what they answer
        params = sampling(output_kind=RequestOutputKind.CUMULATIVE, max_tokens=2)
        async with world.llm.stream(_pieces(), params) as outputs:
            async for output in outputs:
                answers[len(output.prompt_token_ids)] = output.outputs[0].text
        return list(answers.values())
    return None


async def _pieces() -> AsyncIterator[str]:
    yield "Once"
    await trio.lowlevel.checkpoint()
    yield " upon"


async def _answers_to_pieces(world: EngineWorld) -> object:
    first = world.encode("Once")
    answer = await world.answer(first, 2)
    second = [*first, *answer, *world.encode(" upon", special=False)]
    return [world.decode(answer), world.decode(await world.answer(second, 2))]


async def _several_in_one_scope(world: EngineWorld, target: Target) -> object:
    """An embedder's own scope, with a deadline of its own, around requests of its own tasks."""
    texts: dict[str, str] = {}

    async def ask(prompt: str) -> None:
        texts[prompt] = (await world.llm.complete(prompt, sampling())).outputs[0].text

    with target.here(), trio.move_on_after(3600):
        async with trio.open_nursery() as nursery:
            for prompt in ("a", "b", "c"):
                nursery.start_soon(ask, prompt)
        return [texts[prompt] for prompt in ("a", "b", "c")]
    return None


async def _three_texts(world: EngineWorld) -> object:
    return [await world.text(prompt) for prompt in ("a", "b", "c")]


async def _one_of_two(world: EngineWorld, target: Target) -> object:
    """Its sibling in the same nursery has its answer, whatever happens."""
    results: dict[str, Any] = {}

    async def cancelled() -> None:
        with target.here():
            results["a"] = (await world.llm.complete("a", sampling())).outputs[0].text

    async def sibling() -> None:
        results["b"] = (await world.llm.complete("b", sampling())).outputs[0].text

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancelled)
        nursery.start_soon(sibling)
    assert results["b"] == await world.text("b")
    return [results["a"]] if "a" in results else None


async def _first_text(world: EngineWorld) -> object:
    return [await world.text("a")]


LIBRARY = [
    Kind("complete", _complete, _one_text),
    Kind("stream, deltas", _stream_of(), _one_text),
    Kind("stream, cumulative", _stream_of(output_kind=RequestOutputKind.CUMULATIVE), _one_text),
    Kind("stream, n=3", _stream_of(n=3), _three_completions),
    Kind("stream, only the end", _stream_of(output_kind=RequestOutputKind.FINAL_ONLY), _one_text),
    Kind("stream, logprobs and a stop string", _stream_of(logprobs=2, stop="~~~"), _one_text),
    Kind("generate, closed", _closed_generator, _one_text),
    Kind("generate, abandoned", _abandoned_generator, _one_output),
    Kind("submit and release", _submit_and_release, _one_text),
    Kind("beam search", _beam_search, _beam_texts),
    Kind("streaming input", _streaming_input, _answers_to_pieces),
    Kind("several in an embedder's scope", _several_in_one_scope, _three_texts),
    Kind("one of two siblings", _one_of_two, _first_text),
]

_NAMED_RUNS = (_complete, _submit_and_release)
NAMED = [kind for kind in LIBRARY if kind.run in _NAMED_RUNS or isinstance(kind.run, partial)]
"""Those that can be ended by their name."""
