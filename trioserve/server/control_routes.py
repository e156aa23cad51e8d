"""Steering the engine over HTTP, for those who run the server (`--enable-control-routes`).

Paths, parameters and answers are vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs
import trio
from quart import request

from trioserve.errors import InvalidRequestError, TrioserveError
from trioserve.server.replies import json_reply
from trioserve.server.served_models import ServedModels
from trioserve.validators import shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from quart import Response

    from trioserve.async_llm import AsyncLLM
    from trioserve.frontend.control import PauseMode, WakeTag

__all__ = ["Controls"]

T = TypeVar("T")

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@attrs.frozen(eq=False)
class Controls:
    """The handlers. What is told to the engine cannot be taken back by leaving.

    All raise InvalidRequestError for a query parameter that is wrong, or that there is not: a misspelt one
    would leave the default, which may end every request.
    """

    _models: ServedModels

    async def reset_prefix_cache(self) -> Response:
        """`reset` is false where nothing was done, because requests run that are not to be reset."""
        name = "reset_running_requests"
        query = _query(name)
        resets_running = _boolean(query, name)
        was_reset = await self._tell(query, lambda llm: llm.reset_prefix_cache(resets_running))
        return json_reply({"reset": all(was_reset)})

    async def pause(self) -> Response:
        query = _query("mode", "clear_cache")
        mode = cast("PauseMode", query.get("mode", "abort"))
        clears = _boolean(query, "clear_cache", default=True)
        await self._tell(query, lambda llm: llm.pause_generation(mode, clears))
        return json_reply({"status": "paused"})

    async def resume(self) -> Response:
        await self._tell(_query(), lambda llm: llm.resume_generation())
        return json_reply({"status": "resumed"})

    async def is_paused(self) -> Response:
        """True only if all that are asked are."""
        paused = await self._tell(_query(), lambda llm: llm.is_paused())
        return json_reply({"is_paused": all(paused)})

    async def sleep(self) -> Response:
        query = _query("level", "mode")
        level = query.get("level", "1")
        if level not in {"0", "1", "2"}:
            raise _wrong("level", "0, 1 or 2", level)
        mode = cast("PauseMode", query.get("mode", "abort"))
        await self._tell(query, lambda llm: llm.sleep(int(level), mode))
        return json_reply({"status": "sleeping"})

    async def wake_up(self) -> Response:
        query = _query("tags")
        tags = cast("list[WakeTag]", request.args.getlist("tags"))
        await self._tell(query, lambda llm: llm.wake_up(tags or None))
        return json_reply({"status": "awake"})

    async def is_sleeping(self) -> Response:
        """True only if all that are asked are."""
        asleep = await self._tell(_query(), lambda llm: llm.is_sleeping())
        return json_reply({"is_sleeping": all(asleep)})

    async def _tell(self, query: Mapping[str, str], call: Callable[[AsyncLLM], Awaitable[T]]) -> list[T]:
        """The answers of the model that the query names, or of all: they are told side by side, each to its
        end, also if another refuses. Raises the first refusal."""
        services = self._models.services
        if name := query.get("model"):
            services = [self._models.pick(name, services)]
        answers: list[T] = []
        refusals: list[TrioserveError] = []

        async def tell(llm: AsyncLLM) -> None:
            try:
                answers.append(await call(llm))
            except TrioserveError as error:
                refusals.append(error)

        async with trio.open_nursery() as nursery:
            for service in services:
                nursery.start_soon(tell, service.llm)
        if refusals:
            raise refusals[0]
        return answers


def _query(*known: str) -> dict[str, Any]:
    """The query's parameters, each with its first value; `model` is always one."""
    if unknown := sorted(request.args.keys() - {"model", *known}):
        allowed = ", ".join((*known, "model"))
        raise InvalidRequestError(
            f"There is no query parameter {shown(unknown[0])} here; known: {allowed}.", parameter=unknown[0]
        )
    return request.args.to_dict()


def _boolean(query: dict[str, Any], name: str, *, default: bool = False) -> bool:
    given = query.get(name)
    if given is None:
        return default
    if (value := _BOOLEANS.get(given.lower())) is None:
        raise _wrong(name, "true or false", given)
    return value


def _wrong(name: str, allowed: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {allowed}, got {shown(value)}.", parameter=name)
