"""Steering the engine over HTTP, for those who run the server (`--enable-control-routes`).

Paths, parameters and answers are vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import attrs
from quart import request

from trioserve.async_llm import AsyncLLM
from trioserve.errors import InvalidRequestError
from trioserve.server.replies import json_reply
from trioserve.validators import shown

if TYPE_CHECKING:
    from quart import Response

    from trioserve.frontend.control import PauseMode, WakeTag

__all__ = ["Controls"]

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@attrs.frozen(eq=False)
class Controls:
    """The handlers. What is told to the engine cannot be taken back by leaving.

    All raise InvalidRequestError for a query parameter that is wrong, or that there is not: a misspelt one
    would leave the default, which may end every request.
    """

    _llm: AsyncLLM

    async def reset_prefix_cache(self) -> Response:
        """`reset` is false, and nothing done, while requests run that are not to be reset."""
        name = "reset_running_requests"
        resets_running = _boolean(_query(name), name)
        return json_reply({"reset": await self._llm.reset_prefix_cache(resets_running)})

    async def pause(self) -> Response:
        query = _query("mode", "clear_cache")
        mode = cast("PauseMode", query.get("mode", "abort"))
        await self._llm.pause_generation(mode, _boolean(query, "clear_cache", default=True))
        return json_reply({"status": "paused"})

    async def resume(self) -> Response:
        _query()
        await self._llm.resume_generation()
        return json_reply({"status": "resumed"})

    async def is_paused(self) -> Response:
        return json_reply({"is_paused": await self._llm.is_paused()})

    async def sleep(self) -> Response:
        query = _query("level", "mode")
        level = query.get("level", "1")
        if level not in {"0", "1", "2"}:
            raise _wrong("level", "0, 1 or 2", level)
        await self._llm.sleep(int(level), cast("PauseMode", query.get("mode", "abort")))
        return json_reply({"status": "sleeping"})

    async def wake_up(self) -> Response:
        _query("tags")
        tags = cast("list[WakeTag]", request.args.getlist("tags"))
        await self._llm.wake_up(tags or None)
        return json_reply({"status": "awake"})

    async def is_sleeping(self) -> Response:
        return json_reply({"is_sleeping": await self._llm.is_sleeping()})


def _query(*known: str) -> dict[str, Any]:
    """The query's parameters, each with its first value."""
    if unknown := sorted(request.args.keys() - set(known)):
        allowed = ", ".join(known) or "none"
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
