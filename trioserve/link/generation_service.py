"""The service of an engine core that generates: sequences, some of which wait for their grammar first."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.core.request import CoreRequest, MultimodalKey
from trioserve.core.step_result import StepResult
from trioserve.errors import EngineGenerateError, InvalidRequestError
from trioserve.link.columns import pack_step, unpack_token_ids
from trioserve.link.messages import Add, MessageError
from trioserve.link.step_parts import split_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trioserve.core.engine import EngineCore
    from trioserve.core.stats import CoreStats
    from trioserve.link.controls import Controls
    from trioserve.link.grammar_compiler import GrammarCompiler
    from trioserve.link.messages import Message, StepOutputs
    from trioserve.link.populating import CachePopulation
    from trioserve.link.service import Caller
    from trioserve.structured_outputs import StructuredOutputsParams
    from trioserve.worker.grammar import GrammarMatcher
    from trioserve.worker.model_runner import ModelRunner

__all__ = ["GenerationService"]

log = logging.getLogger(__name__)


class GenerationService:
    """See `trioserve.link.service.Service`."""

    def __init__(
        self,
        core: EngineCore,
        runner: ModelRunner,
        grammars: GrammarCompiler,
        controls: Controls,
        population: CachePopulation,
    ) -> None:
        self.core = core
        self._runner = runner
        self._grammars = grammars
        self._controls = controls
        self._population = population
        # Sequences that wait for their grammar; each has a task, which its scope ends.
        self._waiting_for_grammar = controls.on_their_way
        self._num_tokens_waiting: dict[int, int] = {}  # in their prompts

    # Requests

    def receive(self, message: Message, caller: Caller[StepResult]) -> None:
        if not isinstance(message, Add):
            raise MessageError(f"unexpected {type(message).__name__}")
        grammar = None
        try:
            self._controls.adapters.check(message.lora)
            self._runner.check_params(message.params)
            if message.params.structured_outputs is not None:
                grammar = self._grammars.try_get(message.params.structured_outputs)
                if grammar is None:
                    self._wait_for_grammar(message, message.params.structured_outputs, caller)
                    return
        except InvalidRequestError as error:
            caller.refuse(message.request_id, error)
            return
        self._add(message, grammar, caller)

    def _wait_for_grammar(
        self, add: Add, params: StructuredOutputsParams, caller: Caller[StepResult]
    ) -> None:
        scope = self._waiting_for_grammar[add.request_id] = trio.CancelScope()
        self._num_tokens_waiting[add.request_id] = add.num_prompt_tokens
        caller.nursery.start_soon(self._add_with_grammar, add, params, scope, caller)

    async def _add_with_grammar(
        self,
        add: Add,
        params: StructuredOutputsParams,
        scope: trio.CancelScope,
        caller: Caller[StepResult],
    ) -> None:
        deadline = trio.current_time() + (math.inf if add.time_left is None else add.time_left)
        try:
            with scope:
                grammar = await self._grammars.compile(params)
                if not scope.cancel_called:  # by an abort that came together with the grammar
                    left = deadline - trio.current_time()
                    add = attrs.evolve(add, time_left=None if math.isinf(left) else left)
                    self._add(add, grammar, caller)
        except InvalidRequestError as error:
            caller.refuse(add.request_id, error)
        except EngineGenerateError as error:
            log.error("request %d: %s", add.request_id, error)
            caller.report(StepResult.failure(add.request_id))
        finally:
            self._stop_waiting(add.request_id)
        caller.wake()

    def _stop_waiting(self, request_id: int) -> None:
        self._waiting_for_grammar.pop(request_id, None)
        self._num_tokens_waiting.pop(request_id, None)

    def _add(self, add: Add, grammar: GrammarMatcher | None, caller: Caller[StepResult]) -> None:
        try:
            self.core.add(_to_core_request(add, grammar))
        except ValueError as error:  # the frontend let it through
            log.error("request %d cannot be run: %s", add.request_id, error)
            caller.refuse(add.request_id, InvalidRequestError(f"The request cannot be run: {error}."))

    def abort(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if (scope := self._waiting_for_grammar.get(request_id)) is not None:
                scope.cancel()
                self._stop_waiting(request_id)  # now, so that it is not counted until its task has ended
        self.core.abort(request_ids)

    @property
    def num_on_their_way(self) -> int:
        return len(self._waiting_for_grammar)

    @property
    def num_tokens_on_their_way(self) -> int:
        return sum(self._num_tokens_waiting.values())

    # Results

    def split(self, result: StepResult) -> Iterator[StepResult]:
        return split_step(result)

    def pack(self, result: StepResult, stats: CoreStats) -> StepOutputs:
        return pack_step(result, stats)

    async def rest_until(self, wanted: trio.Event) -> None:
        """Meanwhile the KV cache gets its memory."""
        await self._population.go_on_until(wanted)


def _to_core_request(add: Add, grammar: GrammarMatcher | None) -> CoreRequest:
    return CoreRequest(
        request_id=add.request_id,
        prompt_token_ids=unpack_token_ids(add.prompt_token_ids).tolist(),
        params=add.params,
        constraints=add.constraints,
        seed=add.seed,
        streams=add.streams,
        priority=add.priority,
        deadline=math.inf if add.time_left is None else time.monotonic() + add.time_left,
        grammar=grammar,
        cache_salt=add.cache_salt,
        lora=add.lora,
        audio=add.audio,
        multimodal_keys=() if add.audio is None else [_heard_by_all(add)],
    )


def _heard_by_all(add: Add) -> MultimodalKey:
    """The whole prompt means what its audio says."""
    assert add.audio is not None
    return MultimodalKey(position=0, length=add.num_prompt_tokens, digest=add.audio.digest)
