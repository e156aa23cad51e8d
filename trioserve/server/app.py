"""The OpenAI-compatible API as an ASGI application."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.server.auth import ApiKeys, require_keys
from trioserve.server.chat_completions import ChatCompletions
from trioserve.server.completions import Completions
from trioserve.server.errors import install_error_handler
from trioserve.server.health import Health
from trioserve.server.metrics_route import Metrics, tell_version
from trioserve.server.models_route import Models
from trioserve.server.request_scope import App
from trioserve.server.service import Service, identify_requests
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from trioserve.async_llm import AsyncLLM

__all__ = ["create_app"]


def create_app(llm: AsyncLLM, server_args: ServerArgs | None = None) -> App:
    """An application over an open engine, which stays its caller's: nothing here starts or ends it.

    Serve it with `trioserve.server.http`, mount it in another ASGI application, or run it under stock
    hypercorn (`trio` worker class). Of `server_args` only `api_key` and `max_body_size` are read here; with
    keys, every route but /health and /ping demands one.
    """
    args = server_args or ServerArgs()
    service = Service.for_llm(llm)
    app = App("trioserve", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = args.max_body_size
    install_error_handler(app)
    identify_requests(app)
    require_keys(app, ApiKeys(args.api_key))
    _add_routes(app, service, args.max_body_size)
    return app


def _add_routes(app: App, service: Service, max_body_size: int) -> None:
    chat, completions = ChatCompletions(service, max_body_size), Completions(service, max_body_size)
    models, health, metrics = Models(service), Health(service), Metrics(service)
    app.post("/v1/chat/completions", endpoint="chat_completions")(chat.create)
    app.post("/v1/completions", endpoint="completions")(completions.create)
    app.get("/v1/models", endpoint="models")(models.list)
    app.get("/v1/models/<path:model>", endpoint="model")(models.retrieve)
    app.get("/health", endpoint="health")(health.check)
    app.route("/ping", methods=["GET", "POST"], endpoint="ping")(health.check)
    app.get("/metrics", endpoint="metrics")(metrics.render)
    app.get("/version", endpoint="version")(tell_version)
