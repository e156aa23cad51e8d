"""Engines to cancel requests of, and what each knows of those that are left.

- `ScriptedWorld`: no core, but a script that counts aborts. It moves only when every task waits, so a request
  is seen at each of its waits.
- `CoreWorld`: the real engine core, in a process of its own with a real model or in this one with a hash
  function. It tells what runs and waits, and whether blocks are held.
"""

from __future__ import annotations

import itertools
from array import array
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import trio
from trio.testing import wait_all_tasks_blocked

import trioserve.async_llm
from byte_tokenizer import EOS, VOCAB_SIZE, byte_model, save_byte_tokenizer
from cancel_everywhere import LeakError
from fake_engine import FakeEngine, open_fake_llm
from hash_model import next_token
from helpers_beam_search import log_softmax, row_of, search, tokens_of
from helpers_core import PagedRunner
from trioserve import AsyncLLM, BeamSearchParams, EngineArgs, SamplingParams, TokensPrompt, TrioserveError
from trioserve.link import core_server
from trioserve.nurseries import ungrouped
from trioserve.outputs import FinishReason
from trioserve.sampling_params import RequestOutputKind
from trioserve.structured_outputs import StructuredOutputsParams
from trioserve.worker.batch import SampledToken
from trioserve.worker.kv_layout import KVCacheLayout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    import pytest

    from trioserve.config import ResolvedModel
    from trioserve.link.messages import Add

__all__ = [
    "BEAMS",
    "NUM_TOKENS",
    "PROMPT",
    "CoreWorld",
    "EngineWorld",
    "HashRunner",
    "ScriptedWorld",
    "hash_answer",
    "hash_model",
    "open_hash_llm",
    "patch_core",
    "sampling",
]

PROMPT = "Once upon"
NUM_TOKENS = 3
"""Of each answer, if nothing else is said."""
BEAMS = BeamSearchParams(beam_width=2, max_tokens=2, ignore_eos=True)
_NEIGHBOUR = "beside it"
_NEIGHBOURS_TOKENS = 2


def sampling(**changes: Any) -> SamplingParams:
    """What a world's `answer` goes by: the most likely token each time."""
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "top_k": 1, "seed": 0, "ignore_eos": True, **changes})


class EngineWorld:
    """What the worlds share: a neighbour to each request, and its map entries."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm

    async def answer(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS, seed: int = 0) -> list[int]:
        """The tokens that a request must give; from elsewhere than the request under test."""
        raise NotImplementedError

    async def beams(self, prompt: Sequence[int]) -> list[str]:
        """The texts that a search with `BEAMS` must find."""
        raise NotImplementedError

    async def answer_in_form(self, prompt: Sequence[int], schema: dict[str, Any]) -> list[int]:
        """As `answer`, where the text must follow a JSON schema."""
        raise NotImplementedError

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self.llm.tokenizer.encode(text, add_special_tokens=special))

    def decode(self, tokens: Sequence[int]) -> str:
        return self.llm.tokenizer.decode(tokens)

    async def text(self, prompt: str, *, seed: int = 0) -> str:
        return self.decode(await self.answer(self.encode(prompt), seed=seed))

    async def run_beside(self, request: Callable[[], Awaitable[object]]) -> object:
        neighbour = await Neighbour.of(self)
        with ungrouped():
            async with trio.open_nursery() as nursery:
                await nursery.start(neighbour.run)
                result = await request()
                await self._check_that_it_has_stopped()
                neighbour.is_enough = True
        return result

    async def _check_that_it_has_stopped(self) -> None:
        """At once: an answer that nobody wants ends by itself before long, and then nothing is to be seen."""
        running = await self.num_running()
        if running > 1:
            raise LeakError(f"{running - 1} sequences go on in the engine")

    async def num_running(self) -> int:
        """Sequences in the engine that have neither ended nor been aborted."""
        raise NotImplementedError

    async def find_leaks(self) -> dict[str, object]:
        open_requests = self.llm.num_open_requests
        return {"open requests": open_requests} if open_requests else {}

    async def rest(self) -> None:
        await wait_all_tasks_blocked()


class Neighbour:
    """Asks for the same again and again, until it is told that it is enough."""

    def __init__(self, llm: AsyncLLM, expected: list[int]) -> None:
        self.is_enough = False
        self._llm = llm
        self._expected = expected

    @classmethod
    async def of(cls, world: EngineWorld) -> Neighbour:
        return cls(world.llm, await world.answer(world.encode(_NEIGHBOUR), _NEIGHBOURS_TOKENS))

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """`started` when the first request is under way."""
        for number in itertools.count():
            tokens = await self._ask(task_status if number == 0 else trio.TASK_STATUS_IGNORED)
            if tokens != self._expected:
                raise LeakError(f"a neighbour got {tokens} instead of {self._expected}")
            if self.is_enough:
                return

    async def _ask(self, task_status: trio.TaskStatus[None]) -> list[int]:
        tokens: list[int] = []
        params = sampling(output_kind=RequestOutputKind.DELTA, max_tokens=_NEIGHBOURS_TOKENS)
        try:
            async with self._llm.stream(_NEIGHBOUR, params) as outputs:
                task_status.started()
                async for output in outputs:
                    for completion in output.outputs:
                        tokens += completion.token_ids
        except TrioserveError as error:
            raise LeakError(f"a neighbour failed: {error!r}") from error
        return tokens


# A script in place of the core


def letters(tokens: Sequence[int]) -> np.ndarray:
    """A model: logits that depend on all tokens, and make a letter the most likely one."""
    logits = np.full(VOCAB_SIZE, -30.0)
    logits[ord("a") : ord("z") + 1] = np.random.default_rng([len(tokens), *tokens]).normal(scale=2, size=26)
    return logits


class ScriptedWorld(EngineWorld):
    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine.llm)
        self.client = engine.client
        self._history: dict[int, list[int]] = {}  # of those that run, by sequence
        self._ended: set[int] = set()
        self._work = trio.Event()
        self._add, engine.client.add = engine.client.add, self._take  # type: ignore[method-assign]

    @classmethod
    @asynccontextmanager
    async def open(
        cls, directory: Path, monkeypatch: pytest.MonkeyPatch, **engine_args: Any
    ) -> AsyncIterator[ScriptedWorld]:
        async with open_fake_llm(directory, monkeypatch, strict=False, **engine_args) as engine:
            world = cls(engine)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(world._run)
                yield world
                nursery.cancel_scope.cancel()

    async def answer(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS, seed: int = 0) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(letters(tokens).argmax()))
        return tokens[len(prompt) :]

    async def beams(self, prompt: Sequence[int]) -> list[str]:
        found = search(letters, prompt, BEAMS, [EOS]).finished
        return [bytes(tokens_of(beam, prompt)).decode() for beam in found]

    async def answer_in_form(self, prompt: Sequence[int], schema: dict[str, Any]) -> list[int]:
        return await self.answer(prompt)  # the script knows no grammar

    async def find_leaks(self) -> dict[str, object]:
        added = {add.request_id for add in self.client.added}
        aborted = self.client.aborted
        found = {
            "sequences that nobody aborted": added - self._ended - set(aborted),
            "aborts of what was never added": set(aborted) - added,
            "aborts that came twice": {number for number in aborted if aborted.count(number) > 1},
        }
        return {**await super().find_leaks(), **{what: which for what, which in found.items() if which}}

    async def num_running(self) -> int:
        return sum(map(self._runs, self.client.added))

    def _take(self, add: Add) -> None:
        self._add(add)
        self._history[add.request_id] = array("i", add.prompt_token_ids).tolist()
        self._work.set()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            await wait_all_tasks_blocked()
            self._step()

    def _step(self) -> None:
        """One token for each; all of it at the end for those that do not stream."""
        updates = [self._advance(add) for add in self.client.added if self._runs(add)]
        self.client.emit_step([update for update in updates if update[1]])
        if not any(map(self._runs, self.client.added)):
            self._work = trio.Event()

    def _runs(self, add: Add) -> bool:
        return add.request_id not in self._ended and add.request_id not in self.client.aborted

    def _advance(self, add: Add) -> tuple[Add, list[SampledToken], FinishReason | None, None]:
        history = self._history[add.request_id]
        history.append(int(letters(history).argmax()))
        answer = history[len(add.prompt_token_ids) // 4 :]
        has_ended = len(answer) == add.params.max_tokens
        if has_ended:
            self._ended.add(add.request_id)
        told = answer[-1:] if add.streams else answer if has_ended else []
        first = len(history) - len(told)
        tokens = [self._sampled(add, history[:place], token) for place, token in enumerate(told, first)]
        return add, tokens, FinishReason.LENGTH if has_ended else None, None

    @staticmethod
    def _sampled(add: Add, before: list[int], token: int) -> SampledToken:
        number = add.params.logprobs
        return SampledToken(token, None if number is None else row_of(log_softmax(letters(before)), number))


# The core


class CoreWorld(EngineWorld):
    """Over a real engine core. The references of a real model are what it gives to requests of its own."""

    def __init__(self, llm: AsyncLLM, *, is_process: bool) -> None:
        super().__init__(llm)
        self._is_process = is_process
        self._answers: dict[tuple[object, ...], Any] = {}

    async def answer(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS, seed: int = 0) -> list[int]:
        key = (*prompt, num_tokens, seed)
        if key not in self._answers:
            self._answers[key] = await self._find_answer(list(prompt), num_tokens, seed)
        return self._answers[key]

    async def _find_answer(self, prompt: list[int], num_tokens: int, seed: int) -> list[int]:
        if not self._is_process:
            return hash_answer(prompt, num_tokens, seed)
        output = await self.llm.complete(TokensPrompt(prompt), sampling(max_tokens=num_tokens))
        return list(output.outputs[0].token_ids)

    async def beams(self, prompt: Sequence[int]) -> list[str]:
        key = ("beams", *prompt)
        if key not in self._answers:
            found = await self.llm.beam_search(TokensPrompt(list(prompt)), BEAMS)
            self._answers[key] = [sequence.output_text for sequence in found.sequences]
        return self._answers[key]

    async def answer_in_form(self, prompt: Sequence[int], schema: dict[str, Any]) -> list[int]:
        params = sampling(structured_outputs=StructuredOutputsParams(json=schema))
        return list((await self.llm.complete(TokensPrompt(list(prompt)), params)).outputs[0].token_ids)

    async def find_leaks(self) -> dict[str, object]:
        now = self.llm.metrics.totals()
        found = {"running": now.running, "waiting": now.waiting, "share of blocks held": now.kv_cache_usage}
        return {**await super().find_leaks(), **{what: which for what, which in found.items() if which}}

    async def num_running(self) -> int:
        await self.llm.check_health()
        now = self.llm.metrics.totals()
        return now.running + now.waiting

    async def rest(self) -> None:
        """What was aborted in a step is free when that is back; and the figures are newer than that."""
        await self.llm.wait_for_requests_to_drain(10)
        await self.llm.check_health()
        if not self._is_process:
            await wait_all_tasks_blocked()


def hash_answer(prompt: Sequence[int], num_tokens: int, seed: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


_NUM_BLOCKS = 64


class HashRunner(PagedRunner):
    """The hash function as a model, whose memory can be given back."""

    bytes_per_block = 1

    def __init__(self) -> None:
        super().__init__(_NUM_BLOCKS, KVCacheLayout(block_size=16))
        self.error: Exception | None = None
        """What the next step raises."""
        self.is_closed = False

    def execute(self, batch: Any) -> Any:
        if self.error is not None:
            raise self.error
        return super().execute(batch)

    def check_params(self, params: SamplingParams) -> None:
        """Everything can be asked for."""

    def max_num_seqs(self, num_blocks: int) -> None:
        """Blocks are all that is needed."""

    def free_kv_cache(self) -> None:
        """There is nothing to free."""

    free_weights = load_weights = free_kv_cache

    def allocate_kv_cache(self, num_blocks: int) -> None:
        assert num_blocks == _NUM_BLOCKS

    def close(self) -> None:
        self.is_closed = True


class NoGrammars:
    """In place of a `GrammarCompiler`."""

    def try_get(self, params: object) -> None:
        raise AssertionError("nobody asks for a grammar")


@asynccontextmanager
async def _open_no_grammars(*_: object) -> AsyncIterator[NoGrammars]:
    yield NoGrammars()


def hash_model(directory: Path) -> ResolvedModel:
    save_byte_tokenizer(directory)
    return byte_model(str(directory), context_length=128, architecture="HashForCausalLM")


def patch_core(monkeypatch: pytest.MonkeyPatch, runner: HashRunner) -> None:
    """Let a core compute with `runner`, and without grammars."""

    def load(_: object, closing: ExitStack) -> tuple[int, HashRunner]:
        closing.callback(runner.close)
        return _NUM_BLOCKS, runner

    monkeypatch.setattr(core_server, "_load", load)
    monkeypatch.setattr(core_server.GrammarCompiler, "open", _open_no_grammars)


@asynccontextmanager
async def open_hash_llm(
    directory: Path, monkeypatch: pytest.MonkeyPatch, **engine_args: Any
) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM over a real core in this process, whose model is the hash function."""
    model = hash_model(directory)
    patch_core(monkeypatch, HashRunner())
    monkeypatch.setattr(trioserve.async_llm, "resolve_model", lambda _: model)
    args = EngineArgs.from_dict(
        {"model": "hash", "engine": "inproc", "log": {"stats_interval": 0}, **engine_args}
    )
    async with AsyncLLM.from_engine_args(args) as llm:
        yield llm
