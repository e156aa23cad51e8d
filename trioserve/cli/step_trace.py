"""One step of the engine core, recorded while it happens.

A session of three requests runs in this process, without the link and its threads: one that just decodes,
one whose output can be guessed from its prompt, and one that arrives while the two run, with a prompt whose
beginning is in the prefix cache. The step that is shown is the third one's first.
"""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import attrs

from trioserve.cli.step_report import Part, Step, describe_step
from trioserve.config import SpeculativeConfig
from trioserve.core.engine import EngineCore
from trioserve.core.request import CoreRequest
from trioserve.errors import InvalidConfigError
from trioserve.frontend.tokenizer import Tokenizer
from trioserve.link.engine_process import keep_openmp_from_spinning
from trioserve.model_sources import resolve_model
from trioserve.sampling_params import SamplingParams
from trioserve.worker.memory import num_kv_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trioserve.args import EngineArgs
    from trioserve.config import ResolvedModel
    from trioserve.core.request import Request

__all__ = ["trace_step"]

_DECODES = "The capital of France is"
_REPEATS = "red, green, blue, " * 6 + "red,"
_ARRIVES = f"{_REPEATS} and now the same three once more, but in the order of the alphabet:"

_WARM_UP_STEPS = 8
"""After these, the first two requests decode, and there is output to guess from."""


def trace_step(args: EngineArgs) -> str:
    """Load the model, run the session, and describe one step. Blocks, and imports torch.

    Where `args` say nothing about speculation, n-grams are looked up, so that there is something to see.

    Raises:
      TrioserveError: the model cannot be had, or not be served.
    """
    keep_openmp_from_spinning()  # as in an engine process, so that the times are those that it has
    from trioserve.worker.model_runner import ModelRunner  # noqa: PLC0415 - torch, and not before it is needed

    if args.speculative_config is None:
        args = attrs.evolve(args, speculative_config=SpeculativeConfig())
    config = args.create_engine_config()
    model = resolve_model(config.model)
    tokenizer = Tokenizer.from_directory(model.tokenizer_directory)
    _check_room(model, tokenizer)
    with closing(ModelRunner(model, config)) as runner:
        num_blocks = num_kv_blocks(runner.layout, runner.bytes_per_block, config, model)
        runner.allocate_kv_cache(num_blocks)
        core = EngineCore.from_config(runner, config, model, num_blocks=num_blocks)
        step = _Session(core, tokenizer).run()
        setup = (
            f"{config.model.served_model_names[0]}: {model.architecture}, {model.precision}, "
            f"{config.threads} threads; {num_blocks} KV blocks of {config.cache.block_size} tokens"
        )
        budget = config.scheduler.max_num_batched_tokens
        return "\n".join([setup, "", *describe_step(step, tokenizer, runner.layout, budget)])


def _check_room(model: ResolvedModel, tokenizer: Tokenizer) -> None:
    needed = 1 + max(len(tokenizer.encode(prompt)) for prompt in (_DECODES, _REPEATS, _ARRIVES))
    if model.max_model_len < needed + _WARM_UP_STEPS:
        raise InvalidConfigError(
            f"max_model_len must be at least {needed + _WARM_UP_STEPS} to trace a step, "
            f"got {model.max_model_len}.",
            field="max_model_len",
        )


class _Session:
    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self._core = core
        self._tokenizer = tokenizer
        # Those that have been scheduled; the core changes them.
        self._requests: dict[int, Request] = {}

    def run(self) -> Step:
        """The step in which the third request begins."""
        self._add(1, _DECODES)
        self._add(2, _REPEATS)
        for number in range(1, _WARM_UP_STEPS + 1):
            self._step(number)
        self._add(3, _ARRIVES)
        return self._step(_WARM_UP_STEPS + 1)

    def _add(self, request_id: int, prompt: str) -> None:
        self._core.add(
            CoreRequest(
                request_id=request_id,
                prompt_token_ids=self._tokenizer.encode(prompt),
                params=SamplingParams(temperature=0, max_tokens=100, ignore_eos=True),
                seed=0,
            )
        )

    def _step(self, number: int) -> Step:
        before = {request_id: _copy(request.block_tables) for request_id, request in self._requests.items()}
        seconds: dict[str, float] = {}
        with _timed(seconds, "schedule, launch"):
            plan = self._core.schedule()
        assert plan is not None, "there are requests"
        shares = [request.share for request in plan.requests]
        with _timed(seconds, "plan ahead"):  # in an engine process, another thread executes meanwhile
            self._core.plan_ahead()
        with _timed(seconds, "forward, sample"):
            outputs = self._core.execute(plan)
        with _timed(seconds, "update"):
            self._core.finish(plan, outputs)
            self._core.take_result()
        self._requests |= {request.request_id: request for request in plan.requests}
        parts = [
            Part(request, share, sequence, output, before.get(request.request_id, []))
            for request, share, sequence, output in zip(
                plan.requests, shares, plan.batch.sequences, outputs, strict=True
            )
            if share is not None
        ]
        return Step(number, parts, seconds)


def _copy(tables: list[list[int]]) -> list[list[int]]:
    return [table.copy() for table in tables]


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
