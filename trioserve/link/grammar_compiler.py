"""Grammars of requests, compiled beside the steps of the engine core and kept for the next request.

    compile ─▶ task, one at a time ─▶ child process: is it harmless? ─▶ worker thread: compile ─▶ cache

A client's grammar may be wrong, slow or deadly to the compiler; all three become that client's refusal
(`trioserve.grammars.checking` says why this takes a process). Measured on SmolLM2's 49 k tokens: an ordinary
schema is ready in 15 to 40 ms, the first one ever in 0.8 s; a cache hit takes 10 us.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.errors import ClosedError, InvalidRequestError, ModelNotSupportedError, TrioserveError
from trioserve.grammars.checking import Setup
from trioserve.grammars.compiled import CompiledGrammar, compile_grammar
from trioserve.grammars.tokenizer import load_tokenizer
from trioserve.link.grammar_checker import GrammarChecker
from trioserve.nurseries import end_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llguidance import LLTokenizer

    from trioserve.config import ResolvedModel, StructuredOutputsConfig
    from trioserve.structured_outputs import StructuredOutputsParams
    from trioserve.worker.grammar import GrammarMatcher

__all__ = ["GrammarCompiler"]

log = logging.getLogger(__name__)


@attrs.frozen
class _Refusal:
    """Remembered like a grammar, so that sending a bad one again and again costs nothing."""

    message: str

    def error(self) -> InvalidRequestError:
        return InvalidRequestError(self.message, parameter="structured_outputs")


_Result = CompiledGrammar | _Refusal | TrioserveError


@attrs.define(eq=False)
class _Job:
    """A grammar on its way. All requests for it wait for the same one."""

    num_waiting: int = 0
    result: _Result | None = None
    done: trio.Event = attrs.Factory(trio.Event)


class GrammarCompiler:
    """Use `GrammarCompiler.open`. Owns a task per grammar that somebody waits for, and the child process.

    Bounds: `config.cache_size` results are kept; jobs are at most as many as requests wait in `compile`, and
    one runs at a time, so a bad grammar can hold up new grammars, for one time limit, and nothing else.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        checker: GrammarChecker,
        tokenizer: LLTokenizer | _Refusal,
        setup: Setup,
    ) -> None:
        self._nursery = nursery
        self._checker = checker
        self._tokenizer = tokenizer
        self._vocab_size = setup.model.vocab_size
        self._cache_size = setup.config.cache_size
        self._turn = trio.Lock()  # first come, first served
        self._jobs: dict[StructuredOutputsParams, _Job] = {}
        self._cache: OrderedDict[StructuredOutputsParams, CompiledGrammar | _Refusal] = OrderedDict()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, model: ResolvedModel, config: StructuredOutputsConfig
    ) -> AsyncIterator[GrammarCompiler]:
        """Loads the tokenizer at once (`load_tokenizer`), because that holds the GIL: later it would stop
        all streams. A tokenizer that llguidance cannot read is no obstacle to serving the model: then all
        grammars are refused.

        Leaving the scope kills the child, and waits for a compilation that runs in the thread: about a
        second at most, as the check has found.
        """
        tokenizer = await trio.to_thread.run_sync(_load_tokenizer, model)
        setup = Setup(model=model, config=config)
        async with GrammarChecker.open(setup) as checker, trio.open_nursery() as nursery:
            yield cls(nursery, checker, tokenizer, setup)
            end_nursery(nursery)

    def try_get(self, params: StructuredOutputsParams) -> GrammarMatcher | None:
        """A matcher at its start, if the grammar is there already; None means: call `compile`.

        Raises:
          InvalidRequestError: it has been refused before, or all are.
        """
        if isinstance(self._tokenizer, _Refusal):
            raise self._tokenizer.error()
        found = self._cache.get(params)
        if found is None or (isinstance(found, CompiledGrammar) and found.is_spoiled):
            return None
        self._cache.move_to_end(params)
        return _matcher(found)

    async def compile(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """A matcher at its start, of one's own.

        Cancelling leaves other requests for the same grammar unharmed; if there are none, and it is not
        its turn yet, it is not compiled at all.

        Raises:
          InvalidRequestError: the grammar is not valid, not supported, or too complex.
          EngineGenerateError: the process that checks grammars did not start.
          ClosedError: the compiler's scope ended meanwhile.
        """
        if (matcher := self.try_get(params)) is not None:
            await trio.lowlevel.checkpoint()
            return matcher
        job = self._jobs.get(params)
        if job is None:
            job = self._jobs[params] = _Job()
            self._nursery.start_soon(self._run, params, job)
        job.num_waiting += 1
        try:
            await job.done.wait()
        finally:
            job.num_waiting -= 1
        if job.result is None:
            raise ClosedError("The grammar compiler was closed.")
        return _matcher(job.result)

    async def _run(self, params: StructuredOutputsParams, job: _Job) -> None:
        try:
            async with self._turn:
                if job.num_waiting:
                    job.result = await self._result(params)
                    self._remember(params, job.result)
        except TrioserveError as error:
            job.result = error
        finally:
            del self._jobs[params]
            job.done.set()

    async def _result(self, params: StructuredOutputsParams) -> CompiledGrammar | _Refusal:
        verdict = await self._checker.check(params)
        if verdict.grammar is None:
            return _Refusal(verdict.refused or "")
        assert not isinstance(self._tokenizer, _Refusal)
        # Not abandoned when cancelled: the check has shown that it ends.
        return await trio.to_thread.run_sync(
            compile_grammar, self._tokenizer, verdict.grammar, self._vocab_size
        )

    def _remember(self, params: StructuredOutputsParams, result: CompiledGrammar | _Refusal) -> None:
        self._cache[params] = result
        self._cache.move_to_end(params)
        if len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)


def _load_tokenizer(model: ResolvedModel) -> LLTokenizer | _Refusal:
    try:
        return load_tokenizer(model)
    except ModelNotSupportedError as error:
        log.warning("Structured outputs are not available: %s", error)
        return _Refusal(str(error))


def _matcher(result: _Result) -> GrammarMatcher:
    match result:
        case CompiledGrammar():
            return result.new_matcher()
        case _Refusal():
            raise result.error()
        case _:
            raise result
