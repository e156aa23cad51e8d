"""The OpenAI-compatible API as an ASGI application."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.server.api_keys import ApiKeys
from trioserve.server.auth import require_keys
from trioserve.server.chat_completions import ChatCompletions
from trioserve.server.completions import Completions
from trioserve.server.cors import allow_origins
from trioserve.server.deadlines import TimeLimits
from trioserve.server.door import Door
from trioserve.server.errors import install_error_handler
from trioserve.server.health import Health
from trioserve.server.metrics_route import Metrics, tell_version
from trioserve.server.models_route import Models
from trioserve.server.openapi import Description
from trioserve.server.openapi_routes import ROUTES
from trioserve.server.request_limits import RequestLimits
from trioserve.server.request_scope import App
from trioserve.server.service import Service, identify_requests
from trioserve.server.turns import Turns
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import Callable

    from trioserve.async_llm import AsyncLLM

__all__ = ["create_app"]


def create_app(
    llm: AsyncLLM,
    server_args: ServerArgs | None = None,
    *,
    is_draining: Callable[[], bool] = lambda: False,
) -> App:
    """An application over an open engine, which stays its caller's: nothing here starts or ends it.

    Serve it with `trioserve.server.http`, mount it in another ASGI application, or run it under stock
    hypercorn (`trio` worker class). Of `server_args`, what is about addresses and connections is for that
    server and not read here. While `is_draining` says so, /health/ready is 503.

    Raises:
      InvalidConfigError: `api_key_file` is no file of keys.
    """
    args = server_args or ServerArgs()
    service = Service.for_llm(llm)
    app = App("trioserve", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = args.max_body_size
    app.config["MAX_JSON_DEPTH"] = args.max_json_depth
    app.config["BODY_TIMEOUT"] = args.body_timeout
    app.time_limits = TimeLimits.of(args)
    app.count_expired = llm.metrics.record_expiry
    install_error_handler(app)
    identify_requests(app)
    allow_origins(app, args)
    keys = ApiKeys.of(args)
    require_keys(app, keys, args.open_paths)
    _add_generation(app, service, args)
    description = Description(ROUTES, needs_key=bool(keys), open_paths=args.open_paths)
    app.get("/openapi.json", endpoint="openapi")(description.tell)
    _add_state(app, service, Health(llm, args.health_timeout, is_draining))
    return app


def _add_generation(app: App, service: Service, args: ServerArgs) -> None:
    """What costs the engine work: behind the door, every one."""
    door = Door(service.llm, RequestLimits.of(args))
    turns = Turns(service=service, trusts_templates=args.trust_request_chat_template)
    chat, completions = ChatCompletions(turns), Completions(service)
    app.post("/v1/chat/completions", endpoint="chat_completions")(door.guard(chat.create))
    app.post("/v1/completions", endpoint="completions")(door.guard(completions.create))


def _add_state(app: App, service: Service, health: Health) -> None:
    models, metrics = Models(service), Metrics(service)
    app.get("/v1/models", endpoint="models")(models.list)
    app.get("/v1/models/<path:model>", endpoint="model")(models.retrieve)
    app.get("/health", endpoint="health")(health.check)
    app.get("/health/ready", endpoint="ready")(health.ready)
    app.get("/health/live", endpoint="live")(health.live)
    app.route("/ping", methods=["GET", "POST"], endpoint="ping")(health.check)
    app.get("/metrics", endpoint="metrics")(metrics.render)
    app.get("/version", endpoint="version")(tell_version)
