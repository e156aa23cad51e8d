"""Routes whose handlers belong to a model, and how a request finds the one that it means.

A handler knows one model. Where there is one model, it is what the route calls, and nothing is spent on
choosing. Where there are several, each has handlers of its own, and the route calls a `Dispatcher`, which
reads the name in the request first. Weighed were:

- Handlers that know all models and choose once they have read the request. A body is then read once, but each
  handler of each API has to choose, and to look up what a model has (parsers, defaults, templates).
- An application per model, behind another one. The limits, keys and responses would have to be shared anyway.
- This: a name is decoded (in 0.3 to 2 ms per megabyte) from a body that the handler reads again. Only servers
  of several models pay for that.

What is no JSON (a form, a websocket) names its model in a way of its own. Such a route is not one of
`ModelRoutes`: one handler for all models reads the name, asks `ServedModels.pick` for the model, and leaves
the rest to `hand_over`, as /invocations does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import trio
from quart import request

from trioserve.server.door import Door
from trioserve.server.request_scope import App, request_deadline
from trioserve.server.served_models import ServedModels
from trioserve.server.service import Service

if TYPE_CHECKING:
    from quart import Response

    from trioserve.tasks import Task

__all__ = ["Handler", "ModelRoutes", "RouteTable", "hand_over"]

Handler = Callable[[], Awaitable["Response"]]

_LARGE_BODY = 2**18
"""Bytes of JSON that are searched in a thread: from here on it may take more than half a millisecond."""


@attrs.frozen
class _Named:
    model: str | None = None


_decode = msgspec.json.Decoder(_Named).decode


@attrs.define(eq=False, kw_only=True)
class _Entry:
    """A route, with the handlers of all models that have it."""

    endpoint: str
    is_guarded: bool
    handlers: dict[Service, Handler] = attrs.field(init=False, factory=dict)


@attrs.frozen(eq=False)
class RouteTable:
    """What the models of an application have of routes, until `install` makes them the application's."""

    _app: App
    _door: Door
    models: ServedModels
    _entries: dict[tuple[str, str], _Entry] = attrs.field(init=False, factory=dict)

    def of(self, service: Service) -> ModelRoutes:
        return ModelRoutes(service, self._entries)

    def install(self) -> None:
        """From now on the application answers them. One that no model has is there too, to say so."""
        for (method, path), entry in self._entries.items():
            view = self._view(entry)
            self._app.add_url_rule(path, entry.endpoint, view, methods=[method])

    def _view(self, entry: _Entry) -> Callable[..., Any]:
        only = self.models.only
        if only is None:
            view: Handler = Dispatcher(self.models, entry).answer
        else:
            view = entry.handlers.get(only) or Dispatcher(self.models, entry).refuse
        return self._door.guard(view) if entry.is_guarded else view


@attrs.frozen(eq=False)
class ModelRoutes:
    """Takes the routes of one model."""

    service: Service
    _entries: dict[tuple[str, str], _Entry]
    invocations: dict[str, Handler] = attrs.field(init=False, factory=dict)
    """What POST /invocations does: field of the body -> handler. The first that fits is taken."""

    def post(
        self,
        path: str,
        handler: Handler,
        *,
        endpoint: str,
        tasks: tuple[Task, ...] = (),
        guarded: bool = False,
    ) -> None:
        """POST `path` is `handler`, if the model has one of `tasks` (none: whatever it is).

        It belongs to all models or to none: also those without the task come here, so that their clients are
        told which tasks there are, and which models have it.

        guarded: it costs the engine work, and is behind the door.
        """
        self._add("POST", path, handler, _Entry(endpoint=endpoint, is_guarded=guarded), tasks)

    def get(self, path: str, handler: Handler, *, endpoint: str, tasks: tuple[Task, ...] = ()) -> None:
        """As `post`. The query says which model is meant."""
        self._add("GET", path, handler, _Entry(endpoint=endpoint, is_guarded=False), tasks)

    def _add(self, method: str, path: str, handler: Handler, new: _Entry, tasks: tuple[Task, ...]) -> None:
        entry = self._entries.setdefault((method, path), new)
        if not tasks or self.service.has_task(*tasks):
            entry.handlers[self.service] = handler


@attrs.frozen(eq=False)
class Dispatcher:
    """Hands a request over to the handler of the model that it means, which reads the body anew."""

    _models: ServedModels
    _entry: _Entry
    # One at a time: a large body takes a core.
    _limiter: trio.CapacityLimiter = attrs.field(init=False, factory=lambda: trio.CapacityLimiter(1))

    async def refuse(self) -> Response:
        """No model has the route.

        Raises:
          InvalidRequestError: always.
        """
        self._models.pick(None, self._entry.handlers)
        raise AssertionError("there is no model to pick")

    async def answer(self) -> Response:
        """
        Raises, beside what the handler does:
          ApiError: there is no such model (404), or the body is not taken (as `Service.read_request`).
          InvalidRequestError: the model does not have this route.
          OverloadedError, EngineDeadError, ClosedError: its engine has no room, or is gone.
        """
        service = self._models.pick(await self._name(), self._entry.handlers)
        handler = self._entry.handlers[service]
        return await hand_over(service, handler, is_guarded=self._entry.is_guarded)

    async def _name(self) -> str | None:
        """The name in the request. What has none, or cannot be read, is for a handler to judge."""
        if request.method == "GET":
            return request.args.get("model")
        body = await self._models.services[0].peek_at_body()
        if len(body) < _LARGE_BODY:
            return _name_in(body)
        return await trio.to_thread.run_sync(_name_in, body, limiter=self._limiter)


async def hand_over(service: Service, handler: Handler, *, is_guarded: bool) -> Response:
    """What the handler of this model, which is one of several, says to the request at hand.

    is_guarded: it is for the engine, whose room the door could not look at.

    Raises, beside what the handler does:
      OverloadedError, EngineDeadError, ClosedError: the engine has no room, or is gone.
    """
    if is_guarded:
        service.llm.check_room()
    request_deadline().count_expired = service.llm.metrics.record_expiry
    return await handler()


def _name_in(body: bytes) -> str | None:
    try:
        return _decode(body).model
    except (msgspec.DecodeError, RecursionError):
        return None
