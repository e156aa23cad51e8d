"""The engines of a server: one per model, side by side."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.async_llm import AsyncLLM
from trioserve.errors import TrioserveError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from trioserve.args import EngineArgs

__all__ = ["make_engines", "open_engines"]

log = logging.getLogger("trioserve.serve")


def make_engines(models: Sequence[EngineArgs]) -> list[AsyncLLM]:
    """Not started yet.

    Raises:
      InvalidConfigError: the arguments of one contradict each other.
    """
    configs = [args.create_engine_config() for args in models]
    return [
        AsyncLLM(attrs.evolve(config, cache=attrs.evolve(config.cache, num_engines=len(configs))))
        for config in configs
    ]


@asynccontextmanager
async def open_engines(llms: Sequence[AsyncLLM]) -> AsyncIterator[None]:
    """Start all of them; leaving ends all. Each is a task of its own, so that they do so side by side.

    If one fails while it starts or while it is open, the others and the body are cancelled; not so if its
    core dies, which is for the body to notice.

    Raises:
      TrioserveError: as `AsyncLLM.__aenter__`. Several of them come as a group.
    """
    closing = trio.Event()
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as starting:
            for llm in llms:
                starting.start_soon(nursery.start, partial(_hold, llm, closing))
        try:
            yield
        finally:
            closing.set()


async def _hold(llm: AsyncLLM, closing: trio.Event, *, task_status: trio.TaskStatus[None]) -> None:
    is_ready = False
    try:
        async with llm:
            is_ready = True
            task_status.started()
            await closing.wait()
    except TrioserveError:
        if not is_ready:
            log.error("%s cannot be served", llm.config.model.served_model_names[0])
        raise
