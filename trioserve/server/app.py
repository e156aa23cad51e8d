"""The OpenAI-compatible API as an ASGI application."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.parsers.model_parsers import ModelParsers
from trioserve.reasoning import find_reasoning_format
from trioserve.server.anthropic.messages import Messages, name_requests
from trioserve.server.api_keys import ApiKeys
from trioserve.server.auth import require_keys
from trioserve.server.chat_batches import ChatBatches
from trioserve.server.chat_completions import ChatCompletions
from trioserve.server.completions import Completions
from trioserve.server.control_routes import Controls
from trioserve.server.cors import allow_origins
from trioserve.server.deadlines import TimeLimits
from trioserve.server.docs_page import DOCS_FILES, send_docs_file, send_docs_page
from trioserve.server.door import Door
from trioserve.server.errors import install_error_handler
from trioserve.server.health import Health
from trioserve.server.invocations import Invocations
from trioserve.server.load import Load
from trioserve.server.lora_routes import LoRAUpdates
from trioserve.server.metrics_route import Metrics, tell_version
from trioserve.server.models_route import Models
from trioserve.server.openapi import Description
from trioserve.server.openapi_routes import routes_of
from trioserve.server.rendering import Rendering
from trioserve.server.reply_defaults import ReplyDefaults
from trioserve.server.request_limits import RequestLimits
from trioserve.server.request_scope import App
from trioserve.server.responses.creation import ResponseCreation
from trioserve.server.responses.home import ResponsesHome
from trioserve.server.responses.routes import ResponseRoutes
from trioserve.server.service import Service, identify_requests
from trioserve.server.stored_completions import refuse_stored_completions
from trioserve.server.stored_ids import StoredId
from trioserve.server.token_generate import TokenGenerate
from trioserve.server.tokenization import Tokenization
from trioserve.server.tokenizing import TextEncoder
from trioserve.server.turns import Turns
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from trioserve.async_llm import AsyncLLM

__all__ = ["create_app"]


def create_app(
    llm: AsyncLLM,
    server_args: ServerArgs | None = None,
    *,
    is_draining: Callable[[], bool] = lambda: False,
    responses: ResponsesHome | None = None,
) -> App:
    """An application over an open engine, which stays its caller's: nothing here starts or ends it.

    Serve it with `trioserve.server.http`, mount it in another ASGI application, or run it under stock
    hypercorn (`trio` worker class). Of `server_args`, what is about addresses and connections is for that
    server and not read here. While `is_draining` says so, /health/ready is 503. Without `responses`, none
    are made in the background, and those that are kept are kept in memory.

    Raises:
      InvalidConfigError: `api_key_file` is no file of keys; `enable_lora_updates`, and the engine was started
        without adapters; or `responses_store` is a file, and nobody has
        opened it for `responses`.
    """
    args = server_args or ServerArgs()
    service = Service.for_llm(llm, ReplyDefaults.of(args))
    app = App("trioserve", static_folder=None)
    app.url_map.converters["stored"] = StoredId
    app.config["MAX_CONTENT_LENGTH"] = args.max_body_size
    app.config["MAX_JSON_DEPTH"] = args.max_json_depth
    app.config["BODY_TIMEOUT"] = args.body_timeout
    app.time_limits = TimeLimits.of(args)
    app.count_expired = llm.metrics.record_expiry
    install_error_handler(app)
    identify_requests(app)
    allow_origins(app, args)
    keys = ApiKeys.of(args)
    require_keys(app, keys, _open_paths(args))
    _add_generation(app, service, args, responses or ResponsesHome.without_owner(args))
    _add_stored_completions(app)
    if args.enable_lora_updates:
        _add_lora_updates(app, LoRAUpdates.of(service, args))
    if args.enable_control_routes:
        _add_controls(app, Controls(llm))
    if not args.disable_docs:
        _add_docs(app, Description(routes_of(args), needs_key=bool(keys), open_paths=args.open_paths))
    _add_state(app, service, Health(llm, args.health_timeout, is_draining))
    return app


def _open_paths(args: ServerArgs) -> Collection[str]:
    """What needs no key; a page is nothing without its files."""
    is_page_open = "/docs" in args.open_paths and not args.disable_docs
    return {*args.open_paths, *(DOCS_FILES if is_page_open else ())}


def _add_docs(app: App, description: Description) -> None:
    app.get("/openapi.json", endpoint="openapi")(description.tell)
    app.get("/docs", endpoint="docs")(send_docs_page)
    app.get("/docs/<name>", endpoint="docs_file")(send_docs_file)


def _add_generation(app: App, service: Service, args: ServerArgs, responses: ResponsesHome) -> None:
    """What costs the engine work: behind the door, every one."""
    limits = RequestLimits.of(args)
    door = Door(service.llm, limits)
    turns = Turns(
        service=service,
        trusts_templates=args.trust_request_chat_template,
        template_defaults=args.default_chat_template_kwargs,
        parsers=_model_parsers(service.llm, args),
        hides_unused_tools=args.exclude_tools_when_tool_choice_none,
    )
    chat, completions = ChatCompletions(turns), Completions(service)
    app.post("/v1/chat/completions", endpoint="chat_completions")(door.guard(chat.create))
    batches = ChatBatches(turns)
    app.post("/v1/chat/completions/batch", endpoint="chat_batches")(door.guard(batches.create))
    app.post("/v1/completions", endpoint="completions")(door.guard(completions.create))
    _add_messages(app, door, turns)
    _add_responses(app, door, turns, responses)
    _add_tokens(app, door, turns, args)
    invocations = Invocations(service, {"messages": chat.create, "prompt": completions.create})
    app.post("/invocations", endpoint="invocations")(door.guard(invocations.create))
    app.get("/load", endpoint="load")(Load(limits).tell)


def _model_parsers(llm: AsyncLLM, args: ServerArgs) -> ModelParsers:
    config, template = llm.config, llm.tokenizer.chat_template
    return ModelParsers.find(
        args.tool_call_parser,
        reasoning=find_reasoning_format(config.reasoning_parser, config.reasoning, template),
        chat_template=template,
        special_tokens=llm.tokenizer.special_tokens,
    )


def _add_messages(app: App, door: Door, turns: Turns) -> None:
    """Anthropic's API."""
    messages = Messages(turns, TextEncoder(turns.service.llm))
    name_requests(app)
    app.post("/v1/messages", endpoint="messages")(door.guard(messages.create))
    app.post("/v1/messages/count_tokens", endpoint="count_tokens")(messages.count_tokens)


def _add_responses(app: App, door: Door, turns: Turns, home: ResponsesHome) -> None:
    creation = ResponseCreation(app, turns, home, TextEncoder(turns.service.llm))
    routes, one = ResponseRoutes(home), "/v1/responses/<stored:response_id>"
    app.post("/v1/responses", endpoint="responses")(door.guard(creation.create))
    app.post("/v1/responses/input_tokens", endpoint="input_tokens")(creation.count)
    app.post("/v1/responses/compact", endpoint="compact")(routes.compact)
    app.get(one, endpoint="response")(routes.retrieve)
    app.delete(one, endpoint="delete_response")(routes.delete)
    app.post(f"{one}/cancel", endpoint="cancel_response")(routes.cancel)
    app.get(f"{one}/input_items", endpoint="input_items")(routes.list_items)


def _add_tokens(app: App, door: Door, turns: Turns, args: ServerArgs) -> None:
    """What is about tokens instead of text."""
    encoder = TextEncoder(turns.service.llm)
    tokenization, rendering = Tokenization(turns, encoder), Rendering(turns, encoder)
    generate = TokenGenerate(turns.service)
    app.post("/inference/v1/generate", endpoint="generate_tokens")(door.guard(generate.create))
    app.post("/tokenize", endpoint="tokenize")(tokenization.tokenize)
    app.post("/detokenize", endpoint="detokenize")(tokenization.detokenize)
    app.post("/v1/completions/render", endpoint="render_completion")(rendering.completions)
    app.post("/v1/chat/completions/render", endpoint="render_chat")(rendering.chat)
    if args.enable_tokenizer_info_endpoint:
        app.get("/tokenizer_info", endpoint="tokenizer_info")(tokenization.info)


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
