"""What the description says of each route. A new API adds its routes here; its types speak for themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from trioserve.frontend.control import PauseMode, WakeTag
from trioserve.server.audio.openapi import SPEECH_ROUTES
from trioserve.server.openapi_route import GENERATION_FAILURES, Body, Route
from trioserve.server.pooling.openapi import BYTES, POOLING_READERS, POOLING_ROUTES
from trioserve.server.protocol.anthropic_answers import (
    AnthropicErrorResponse,
    AnyEvent,
    Message,
    TokenCount,
)
from trioserve.server.protocol.anthropic_readers import COUNT_TOKENS_READER, MESSAGES_READER
from trioserve.server.protocol.chat import ChatCompletion, ChatCompletionChunk
from trioserve.server.protocol.classification import ClassificationList
from trioserve.server.protocol.cohere import CohereEmbeddings
from trioserve.server.protocol.completions import Completion, CompletionChunk
from trioserve.server.protocol.embeddings import EmbeddingList
from trioserve.server.protocol.generate import (
    GENERATE_READER,
    Generated,
    GeneratedChunk,
    RenderedRequest,
)
from trioserve.server.protocol.lora import LOAD_LORA_READER, UNLOAD_LORA_READER
from trioserve.server.protocol.models import ModelCard, ModelList
from trioserve.server.protocol.pooling import PooledList
from trioserve.server.protocol.readers import CHAT_BATCH_READER, CHAT_READER, COMPLETION_READER
from trioserve.server.protocol.responses import (
    DeletedResponse,
    InputItemList,
    InputTokenCount,
    ResponseObject,
)
from trioserve.server.protocol.responses_events import ResponseEvent
from trioserve.server.protocol.responses_reader import RESPONSES_READER, TOKEN_COUNT_READER
from trioserve.server.protocol.responses_request import Includable
from trioserve.server.protocol.scoring import Ranking, ScoreList
from trioserve.server.protocol.tokenization import (
    DETOKENIZE_READER,
    TOKENIZE_READER,
    Detokenized,
    Tokenized,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trioserve.server.protocol.reading import RequestReader
    from trioserve.server_args import ServerArgs

__all__ = ["ROUTES", "routes_of"]


_TEXT = Body("text/plain", {"type": "string"})
_PAGE = Body("text/html", {"type": "string"})
_EMPTY = Body("text/plain", {"type": "string", "maxLength": 0})
_VERSION = Body.json(
    {"type": "object", "properties": {"version": {"type": "string"}}, "required": ["version"]}
)
_HEALTH: Mapping[int, tuple[Body, ...]] = {200: (_EMPTY,), 503: (_EMPTY,)}

_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _generation(name: str, summary: str, reader: RequestReader[Any], whole: type, chunk: type) -> Route:
    return Route(
        path=f"/v1/{name}",
        method="post",
        operation_id="create_" + name.replace("/", "_").removesuffix("s"),
        summary=summary,
        answers={200: (Body.json(whole), Body.events(chunk))},
        failures=GENERATION_FAILURES,
        reader=reader,
    )


def _get(path: str, operation_id: str, summary: str, *bodies: Body, **more: Any) -> Route:
    return Route(
        path=path,
        method="get",
        operation_id=operation_id,
        summary=summary,
        answers=more.pop("answers", None) or {200: bodies},
        **more,
    )


def _not_stored(under: str, method: str, operation_id: str) -> Route:
    name = {"name": "completion_id", "in": "path", "required": True, "schema": {"type": "string"}}
    return Route(
        path=f"/v1/chat/completions{under}",
        method=method,
        operation_id=operation_id,
        summary="Always 404: chat completions are not stored",
        answers={},
        failures=frozenset({404}),
        parameters=(name,) if under else (),
    )


def _post(
    path: str, operation_id: str, summary: str, reader: RequestReader[Any], answer: Any, **more: Any
) -> Route:
    """What costs the engine nothing."""
    return Route(
        path=path,
        method="post",
        operation_id=operation_id,
        summary=summary,
        answers={200: (Body.json(answer),)},
        failures=GENERATION_FAILURES - {429},
        reader=reader,
        **more,
    )


def _object(**properties: str) -> Mapping[str, Any]:
    """The schema of an object: key -> type."""
    described = {key: {"type": kind} for key, kind in properties.items()}
    return {"type": "object", "properties": described, "required": list(properties)}


_INVOCATIONS = (
    ChatCompletion | Completion | EmbeddingList | CohereEmbeddings | PooledList | ClassificationList
    | ScoreList | Ranking
)  # fmt: skip
_BOOLEAN = {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 0}
_RESPONSE_ID = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
_INCLUDE = {"type": "array", "items": {"type": "string", "enum": list(get_args(Includable))}}
_MODE = {"type": "string", "enum": list(get_args(PauseMode))}
_LEVEL = {"type": "integer", "enum": [0, 1, 2]}
_TAGS = {"type": "array", "items": {"type": "string", "enum": list(get_args(WakeTag))}}


def _query(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


_WHICH = _query("model", {"type": "string"})


def _control(
    name: str,
    summary: str,
    key: str,
    kind: str,
    *parameters: Mapping[str, Any],
    method: str = "post",
) -> Route:
    return Route(
        path=f"/{name}",
        method=method,
        operation_id=name,
        summary=summary,
        answers={200: (Body.json(_object(**{key: kind})),)},
        failures=frozenset({404, 503}),
        parameters=(*parameters, _WHICH),
        flag="enable_control_routes",
    )


def _lora_update(what: str, summary: str, reader: RequestReader[Any]) -> Route:
    return Route(
        path=f"/v1/{what}_lora_adapter",
        method="post",
        operation_id=f"{what}_lora_adapter",
        summary=summary,
        answers={200: (_TEXT,)},
        failures=GENERATION_FAILURES - {429},
        reader=reader,
        flag="enable_lora_updates",
    )


_RESPONSE = Body.json(ResponseObject)
_RESPONSE_EVENTS = Body.events(ResponseEvent, ends_with_done=False)
_RESPONSE_FAILURES = frozenset({404})

_RESPONSES = (
    Route(
        path="/v1/responses", method="post", operation_id="create_response",
        summary="Go on with a conversation, by items", answers={200: (_RESPONSE, _RESPONSE_EVENTS)},
        failures=GENERATION_FAILURES, reader=RESPONSES_READER,
        links={
            operation: {"response_id": "/id"}
            for operation in ("retrieve_response", "delete_response", "cancel_response", "list_input_items")
        },
    ),
    _post(
        "/v1/responses/input_tokens", "count_input_tokens", "How many tokens the prompt would have",
        TOKEN_COUNT_READER, InputTokenCount,
    ),
    Route(
        path="/v1/responses/compact", method="post", operation_id="compact_response",
        summary="Always 404: conversations are not compacted", answers={}, failures=_RESPONSE_FAILURES,
    ),
    _get(
        "/v1/responses/{response_id}", "retrieve_response", "A response that is kept, or its events again",
        _RESPONSE, _RESPONSE_EVENTS, failures=_RESPONSE_FAILURES,
        parameters=(
            _RESPONSE_ID, _query("stream", _BOOLEAN), _query("starting_after", _COUNT),
            _query("include", _INCLUDE), _query("include_obfuscation", _BOOLEAN),
        ),
    ),
    Route(
        path="/v1/responses/{response_id}", method="delete", operation_id="delete_response",
        summary="Forget a response, and end it if it is being made",
        answers={200: (Body.json(DeletedResponse),)}, failures=_RESPONSE_FAILURES,
        parameters=(_RESPONSE_ID,),
    ),
    Route(
        path="/v1/responses/{response_id}/cancel", method="post", operation_id="cancel_response",
        summary="End a response in the background", answers={200: (_RESPONSE,)},
        failures=_RESPONSE_FAILURES, parameters=(_RESPONSE_ID,),
    ),
    _get(
        "/v1/responses/{response_id}/input_items", "list_input_items", "What a response was given",
        Body.json(InputItemList), failures=_RESPONSE_FAILURES,
        parameters=(
            _RESPONSE_ID, _query("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
            _query("order", {"type": "string", "enum": ["asc", "desc"]}),
            _query("after", {"type": "string"}), _query("include", _INCLUDE),
        ),
    ),
)  # fmt: skip

ROUTES = (
    _generation(
        "chat/completions", "Go on with a conversation", CHAT_READER, ChatCompletion, ChatCompletionChunk
    ),
    Route(
        path="/v1/chat/completions/batch", method="post", operation_id="create_chat_batch",
        summary="Go on with several conversations", answers={200: (Body.json(ChatCompletion),)},
        failures=GENERATION_FAILURES, reader=CHAT_BATCH_READER,
    ),
    _not_stored("", "get", "list_stored"),
    _not_stored("/{completion_id}", "get", "retrieve_stored"),
    _not_stored("/{completion_id}", "post", "update_stored"),
    _not_stored("/{completion_id}", "delete", "delete_stored"),
    _not_stored("/{completion_id}/messages", "get", "list_stored_messages"),
    *_RESPONSES,
    _generation("completions", "Go on with a text", COMPLETION_READER, Completion, CompletionChunk),
    *POOLING_ROUTES,
    *SPEECH_ROUTES,
    _get(
        "/v1/models", "list_models", "The names that models are served under", Body.json(ModelList),
        links={"retrieve_model": {"model": "/data/0/id"}},
    ),
    _get(
        "/v1/models/{model}", "retrieve_model", "One of them", Body.json(ModelCard),
        failures=frozenset({404}), parameters=(_MODEL,),
    ),
    _get("/health", "health", "Does the engine answer?", answers=_HEALTH),
    _get("/health/live", "live", "Is the engine not dead for good?", answers=_HEALTH),
    _get(
        "/health/ready", "ready", "Does the engine answer, and the server take requests?", _EMPTY,
        failures=frozenset({503}),
    ),
    _get("/ping", "ping", "As /health", answers=_HEALTH),
    Route(path="/ping", method="post", operation_id="post_ping", summary="As /health", answers=_HEALTH),
    _get("/metrics", "metrics", "Prometheus metrics", _TEXT),
    _get("/version", "version", "The server's version", _VERSION),
    _get("/openapi.json", "describe", "This description", Body.json({"type": "object"})),
    _get("/docs", "docs", "This description as a page", _PAGE),
    Route(
        path="/v1/messages", method="post", operation_id="create_message",
        summary="Go on with a conversation, as Anthropic's API does",
        answers={200: (Body.json(Message), Body.events(AnyEvent, ends_with_done=False))},
        failures=GENERATION_FAILURES, error=AnthropicErrorResponse, reader=MESSAGES_READER,
    ),
    _post(
        "/v1/messages/count_tokens", "count_tokens", "Count the tokens of a conversation",
        COUNT_TOKENS_READER, TokenCount, error=AnthropicErrorResponse,
    ),
    Route(
        path="/inference/v1/generate", method="post", operation_id="generate_tokens",
        summary="Go on with token ids",
        answers={200: (Body.json(Generated), Body.events(GeneratedChunk))},
        failures=GENERATION_FAILURES, reader=GENERATE_READER,
    ),
    _post("/tokenize", "tokenize", "A text's or conversation's token ids", TOKENIZE_READER, Tokenized),
    _post("/detokenize", "detokenize", "The text of token ids", DETOKENIZE_READER, Detokenized),
    _get(
        "/tokenizer_info", "tokenizer_info", "The tokenizer's configuration", Body.json({"type": "object"}),
        flag="enable_tokenizer_info_endpoint", parameters=(_WHICH,), failures=frozenset({404}),
    ),
    _post(
        "/v1/completions/render", "render_completion", "What a completion would ask of the engine",
        COMPLETION_READER, list[RenderedRequest],
    ),
    _post(
        "/v1/chat/completions/render", "render_chat_completion",
        "What a chat completion would ask of the engine", CHAT_READER, RenderedRequest,
    ),
    Route(
        path="/invocations", method="post", operation_id="invoke",
        summary="A chat completion if the body has messages, a completion if it has a prompt; of models that "
        "pool what they do with such a body",
        answers={
            200: (
                Body.json(_INVOCATIONS),
                Body.events(ChatCompletionChunk | CompletionChunk),
                BYTES,
            )
        },
        failures=GENERATION_FAILURES, reader=(CHAT_READER, COMPLETION_READER, *POOLING_READERS),
    ),
    _lora_update("load", "Let requests have a LoRA adapter", LOAD_LORA_READER),
    _lora_update("unload", "Let no new request have a LoRA adapter", UNLOAD_LORA_READER),
    _get("/load", "load", "How many requests are under way", Body.json(_object(server_load="integer"))),
    _control(
        "reset_prefix_cache", "Forget cached prefixes", "reset", "boolean",
        _query("reset_running_requests", _BOOLEAN),
    ),
    _control(
        "pause", "Compute nothing more", "status", "string",
        _query("mode", _MODE), _query("clear_cache", _BOOLEAN),
    ),
    _control("resume", "Go on", "status", "string"),
    _control("is_paused", "Is it paused?", "is_paused", "boolean", method="get"),
    _control(
        "sleep", "Pause, and give memory back", "status", "string",
        _query("level", _LEVEL), _query("mode", _MODE),
    ),
    _control("wake_up", "Take the memory back, and go on", "status", "string", _query("tags", _TAGS)),
    _control("is_sleeping", "Is it asleep?", "is_sleeping", "boolean", method="get"),
)  # fmt: skip


def routes_of(args: ServerArgs) -> tuple[Route, ...]:
    """Those that an application with these flags has."""
    return tuple(route for route in ROUTES if route.flag is None or getattr(args, route.flag))
