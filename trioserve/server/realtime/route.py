"""WS /v1/realtime: speech in, text out, while it is spoken."""

from __future__ import annotations

import attrs
import trio
from quart import current_app, g, websocket

from trioserve.server.realtime.session import Ending, Peer, RealtimeSession
from trioserve.server.realtime.settings import SessionSettings
from trioserve.server.served_models import ServedModels
from trioserve.server.websocket.scope import GOING_AWAY, NORMAL, current_websocket

__all__ = ["Realtime"]

_SUBPROTOCOL = "realtime"

_CLOSES = {
    Ending.DRAINED: (GOING_AWAY, "The server is shutting down."),
    Ending.IDLE: (NORMAL, "The session was idle for too long."),
}


@attrs.frozen(eq=False)
class Realtime:
    """The handler, for all models that hear: the query or an event says which one is meant."""

    _models: ServedModels
    _idle_timeout: float
    # One at a time, of all sessions: a large event takes a core.
    _reading: trio.CapacityLimiter = attrs.field(init=False, factory=lambda: trio.CapacityLimiter(1))

    async def serve(self) -> None:
        """
        Raises, before the handshake is accepted:
          ApiError: no model is served under the name in the query (404).
          InvalidRequestError: it does not hear.
          OverloadedError, EngineDeadError, ClosedError: its engine has no room, or is gone.
        """
        is_openai = websocket.args.get("intent") == "transcription"
        settings = SessionSettings.begin(self._models, websocket.args.get("model"), is_openai=is_openai)
        settings.service.llm.check_room()
        is_offered = _SUBPROTOCOL in websocket.requested_subprotocols
        await websocket.accept({"X-Request-Id": g.request_id}, _SUBPROTOCOL if is_offered else None)
        session = RealtimeSession(
            Peer(websocket.receive, websocket.send),
            settings,
            draining=current_websocket().draining,
            idle_timeout=self._idle_timeout,
            max_json_depth=current_app.config["MAX_JSON_DEPTH"],
            reading=self._reading,
        )
        await websocket.close(*_CLOSES[await session.run()])
