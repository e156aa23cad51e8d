"""The OpenAI-compatible API as an ASGI application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trioserve.observability.together import ServerCounts
from trioserve.server.anthropic.messages import name_requests
from trioserve.server.api_keys import ApiKeys
from trioserve.server.audio.routes import add_speech
from trioserve.server.auth import require_keys
from trioserve.server.control_routes import Controls
from trioserve.server.cors import allow_origins
from trioserve.server.deadlines import TimeLimits
from trioserve.server.docs_page import DOCS_FILES, send_docs_file, send_docs_page
from trioserve.server.door import Door
from trioserve.server.errors import install_error_handler
from trioserve.server.generation_routes import add_generation, add_tokens, turns_of
from trioserve.server.health import Health
from trioserve.server.invocations import Invocations
from trioserve.server.load import Load
from trioserve.server.lora_routes import LoRAUpdates
from trioserve.server.metrics_route import Metrics, tell_version
from trioserve.server.model_routes import RouteTable
from trioserve.server.models_route import Models
from trioserve.server.openapi import Description
from trioserve.server.openapi_routes import routes_of
from trioserve.server.pooling.routes import add_pooling
from trioserve.server.request_limits import RequestLimits
from trioserve.server.request_scope import App
from trioserve.server.responses.home import ResponsesHome
from trioserve.server.responses.routes import ResponseRoutes
from trioserve.server.served_models import ServedModels
from trioserve.server.service import identify_requests
from trioserve.server.stored_completions import refuse_stored_completions
from trioserve.server.stored_ids import StoredId
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from trioserve.async_llm import AsyncLLM
    from trioserve.observability.metrics import EngineMetrics
    from trioserve.server.model_routes import ModelRoutes

__all__ = ["create_app"]


def create_app(
    llm: AsyncLLM | Sequence[AsyncLLM],
    server_args: ServerArgs | None = None,
    *,
    is_draining: Callable[[], bool] = lambda: False,
    responses: ResponsesHome | None = None,
) -> App:
    """An application over an open engine, or over several, which a request chooses from by its `model`. They
    stay their caller's: nothing here starts or ends them.

    Serve it with `trioserve.server.http`, mount it in another ASGI application, or run it under stock
    hypercorn (`trio` worker class). Of `server_args`, what is about addresses and connections is for that
    server and not read here. While `is_draining` says so, /health/ready is 503. Without `responses`, none
    are made in the background, and those that are kept are kept in memory.

    Raises:
      InvalidConfigError: `api_key_file` is no file of keys; `enable_lora_updates`, and no engine was started
        with adapters; two engines have a name in common; or `responses_store` is a file, and nobody has
        opened it for `responses`.
    """
    args = server_args or ServerArgs()
    models = ServedModels.of(tuple(llm) if isinstance(llm, Sequence) else (llm,), args)
    limits, home = RequestLimits.of(args), responses or ResponsesHome.without_owner(args)
    counts = ServerCounts() if models.only is None else models.only.llm.metrics
    app = _empty_app(args, counts)
    keys = ApiKeys.of(args)
    require_keys(app, keys, _open_paths(args))
    door = Door(limits, None if models.only is None else models.only.llm, counts.record_refusal)
    table = RouteTable(app, door, models)
    invocations = {}
    for service in models.services:
        routes = table.of(service)
        _add_model(app, routes, args, home)
        invocations[service] = routes.invocations
    table.install()
    add_speech(app, door, models, args)
    app.post("/invocations", endpoint="invocations")(door.guard(Invocations(models, invocations).create))
    if models.with_task("transcription"):
        _add_realtime(app, door, models, args)
    _add_responses(app, home)
    _add_stored_completions(app)
    if args.enable_lora_updates:
        _add_lora_updates(app, LoRAUpdates.of(models, args))
    if args.enable_control_routes:
        _add_controls(app, Controls(models))
    if not args.disable_docs:
        _add_docs(app, Description(routes_of(args), needs_key=bool(keys), open_paths=args.open_paths))
    app.get("/load", endpoint="load")(Load(limits).tell)
    app.get("/metrics", endpoint="metrics")(Metrics.of(models, counts).render)
    _add_state(app, Models(models), Health.of(models, args.health_timeout, is_draining))
    return app


def _empty_app(args: ServerArgs, counts: EngineMetrics | ServerCounts) -> App:
    app = App("trioserve", static_folder=None)
    app.url_map.converters["stored"] = StoredId
    app.config["MAX_CONTENT_LENGTH"] = args.max_body_size
    app.config["MAX_JSON_DEPTH"] = args.max_json_depth
    app.config["BODY_TIMEOUT"] = args.body_timeout
    app.time_limits = TimeLimits.of(args)
    app.count_expired, app.count_refusal = counts.record_expiry, counts.record_refusal
    app.count_websockets = counts.record_websocket
    install_error_handler(app)
    identify_requests(app)
    name_requests(app)
    allow_origins(app, args)
    return app


def _add_model(app: App, routes: ModelRoutes, args: ServerArgs, home: ResponsesHome) -> None:
    """The routes of one model: a line for each family of routes, whatever the model's tasks are."""
    turns = turns_of(routes.service, args)
    add_generation(routes, turns, app, home)
    add_tokens(routes, turns, args)
    add_pooling(routes, turns)


def _open_paths(args: ServerArgs) -> Collection[str]:
    """What needs no key; a page is nothing without its files."""
    is_page_open = "/docs" in args.open_paths and not args.disable_docs
    return {*args.open_paths, *(DOCS_FILES if is_page_open else ())}


def _add_docs(app: App, description: Description) -> None:
    app.get("/openapi.json", endpoint="openapi")(description.tell)
    app.get("/docs", endpoint="docs")(send_docs_page)
    app.get("/docs/<name>", endpoint="docs_file")(send_docs_file)


def _add_realtime(app: App, door: Door, models: ServedModels, args: ServerArgs) -> None:
    # Imported here: it needs numpy and FFmpeg, which only a model that hears does.
    from trioserve.server.realtime.route import Realtime  # noqa: PLC0415

    realtime = Realtime(models, args.realtime_idle_timeout)
    app.websocket("/v1/realtime", endpoint="realtime")(door.guard(realtime.serve))


def _add_responses(app: App, home: ResponsesHome) -> None:
    """What is asked about responses that there are already, whichever model they are of."""
    routes, one = ResponseRoutes(home), "/v1/responses/<stored:response_id>"
    app.post("/v1/responses/compact", endpoint="compact")(routes.compact)
    app.get(one, endpoint="response")(routes.retrieve)
    app.delete(one, endpoint="delete_response")(routes.delete)
    app.post(f"{one}/cancel", endpoint="cancel_response")(routes.cancel)
    app.get(f"{one}/input_items", endpoint="input_items")(routes.list_items)


def _add_lora_updates(app: App, updates: LoRAUpdates) -> None:
    app.post("/v1/load_lora_adapter", endpoint="load_lora_adapter")(updates.load)
    app.post("/v1/unload_lora_adapter", endpoint="unload_lora_adapter")(updates.unload)


def _add_controls(app: App, controls: Controls) -> None:
    app.post("/reset_prefix_cache", endpoint="reset_prefix_cache")(controls.reset_prefix_cache)
    app.post("/pause", endpoint="pause")(controls.pause)
    app.post("/resume", endpoint="resume")(controls.resume)
    app.get("/is_paused", endpoint="is_paused")(controls.is_paused)
    app.post("/sleep", endpoint="sleep")(controls.sleep)
    app.post("/wake_up", endpoint="wake_up")(controls.wake_up)
    app.get("/is_sleeping", endpoint="is_sleeping")(controls.is_sleeping)


def _add_stored_completions(app: App) -> None:
    """So that clients are told why there are none."""
    path = "/v1/chat/completions"
    app.get(path, endpoint="list_stored")(refuse_stored_completions)
    one = f"{path}/<stored:completion_id>"
    for method in ("GET", "POST", "DELETE"):
        app.route(one, methods=[method], endpoint=f"{method.lower()}_stored")(refuse_stored_completions)
    app.get(f"{one}/messages", endpoint="stored_messages")(refuse_stored_completions)


def _add_state(app: App, models: Models, health: Health) -> None:
    app.get("/v1/models", endpoint="models")(models.list)
    app.get("/v1/models/<path:model>", endpoint="model")(models.retrieve)
    app.get("/health", endpoint="health")(health.check)
    app.get("/health/ready", endpoint="ready")(health.ready)
    app.get("/health/live", endpoint="live")(health.live)
    app.route("/ping", methods=["GET", "POST"], endpoint="ping")(health.check)
    app.get("/version", endpoint="version")(tell_version)
