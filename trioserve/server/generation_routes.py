"""The routes of models that generate: OpenAI's, Anthropic's and our own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.parsers.model_parsers import ModelParsers
from trioserve.reasoning import find_reasoning_format
from trioserve.server.anthropic.messages import Messages
from trioserve.server.chat_batches import ChatBatches
from trioserve.server.chat_completions import ChatCompletions
from trioserve.server.completions import Completions
from trioserve.server.rendering import Rendering
from trioserve.server.responses.creation import ResponseCreation
from trioserve.server.token_generate import TokenGenerate
from trioserve.server.tokenization import Tokenization
from trioserve.server.tokenizing import TextEncoder
from trioserve.server.turns import Turns

if TYPE_CHECKING:
    from trioserve.async_llm import AsyncLLM
    from trioserve.server.model_routes import Handler, ModelRoutes
    from trioserve.server.request_scope import App
    from trioserve.server.responses.home import ResponsesHome
    from trioserve.server.service import Service
    from trioserve.server_args import ServerArgs
    from trioserve.tasks import Task

__all__ = ["add_generation", "add_tokens", "turns_of"]

_GENERATE: tuple[Task, ...] = ("generate",)


def turns_of(service: Service, args: ServerArgs) -> Turns:
    return Turns(
        service=service,
        trusts_templates=args.trust_request_chat_template,
        template_defaults=args.default_chat_template_kwargs,
        parsers=_model_parsers(service.llm, args),
        hides_unused_tools=args.exclude_tools_when_tool_choice_none,
    )


def _model_parsers(llm: AsyncLLM, args: ServerArgs) -> ModelParsers:
    config, template = llm.config, llm.tokenizer.chat_template
    return ModelParsers.find(
        args.tool_call_parser,
        reasoning=find_reasoning_format(config.reasoning_parser, config.reasoning, template),
        chat_template=template,
        special_tokens=llm.tokenizer.special_tokens,
    )


def add_generation(routes: ModelRoutes, turns: Turns, app: App, home: ResponsesHome) -> None:
    """What goes on with a text or a conversation."""
    chat, completions = ChatCompletions(turns), Completions(turns.service)
    _add_generating(routes, "/v1/chat/completions", chat.create, "chat_completions")
    _add_generating(routes, "/v1/chat/completions/batch", ChatBatches(turns).create, "chat_batches")
    _add_generating(routes, "/v1/completions", completions.create, "completions")
    generate = TokenGenerate(turns.service)
    _add_generating(routes, "/inference/v1/generate", generate.create, "generate_tokens")
    _add_messages(routes, turns)
    creation = ResponseCreation(app, turns, home, TextEncoder(turns.service.llm))
    _add_generating(routes, "/v1/responses", creation.create, "responses")
    routes.post("/v1/responses/input_tokens", creation.count, endpoint="input_tokens", tasks=_GENERATE)
    if turns.service.has_task(*_GENERATE):
        routes.invocations.update({"messages": chat.create, "prompt": completions.create})


def _add_generating(routes: ModelRoutes, path: str, handler: Handler, endpoint: str) -> None:
    routes.post(path, handler, endpoint=endpoint, tasks=_GENERATE, guarded=True)


def _add_messages(routes: ModelRoutes, turns: Turns) -> None:
    """Anthropic's API."""
    messages = Messages(turns, TextEncoder(turns.service.llm))
    _add_generating(routes, "/v1/messages", messages.create, "messages")
    path = "/v1/messages/count_tokens"
    routes.post(path, messages.count_tokens, endpoint="count_tokens", tasks=_GENERATE)


def add_tokens(routes: ModelRoutes, turns: Turns, args: ServerArgs) -> None:
    """What is about tokens, and costs the engine nothing. Prompts are rendered for what generates only."""
    encoder = TextEncoder(turns.service.llm)
    tokenization, rendering = Tokenization(turns, encoder), Rendering(turns, encoder)
    routes.post("/tokenize", tokenization.tokenize, endpoint="tokenize")
    routes.post("/detokenize", tokenization.detokenize, endpoint="detokenize")
    if args.enable_tokenizer_info_endpoint:
        routes.get("/tokenizer_info", tokenization.info, endpoint="tokenizer_info")
    for path, handler, endpoint in (
        ("/v1/completions/render", rendering.completions, "render_completion"),
        ("/v1/chat/completions/render", rendering.chat, "render_chat"),
    ):
        routes.post(path, handler, endpoint=endpoint, tasks=_GENERATE)
