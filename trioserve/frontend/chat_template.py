"""From a conversation to the text that the model was trained to continue.

Models bring a Jinja template. It is rendered in a sandbox, with the few helpers that templates written for
transformers count on (https://huggingface.co/docs/transformers/chat_templating).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from trioserve.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from trioserve.frontend.tokenizer import Tokenizer

__all__ = ["ChatOptions", "ChatTemplate"]


class ChatOptions(TypedDict, total=False):
    """How a conversation is rendered, beside the messages themselves."""

    add_generation_prompt: bool
    """Open the assistant's turn at the end (the default)."""
    continue_final_message: bool
    """Leave the last message open, so that the model goes on with it."""
    tools: Sequence[Mapping[str, Any]] | None
    """Descriptions of functions, for templates that show them."""
    template_kwargs: Mapping[str, Any] | None
    """Whatever else the template understands."""


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None) -> None:
        self._template = _compile(source)
        self._knows_developers = "developer" in source
        self._special_tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The one that the model brings, if any."""
        if tokenizer.chat_template is None:
            return None
        return cls(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> str:
        """The prompt for these messages.

        Raises:
          InvalidRequestError: the template refuses the messages, or the options contradict each other.
        """
        add_generation_prompt = options.get("add_generation_prompt", True)
        continue_final_message = options.get("continue_final_message", False)
        if not (isinstance(messages, Sequence) and all(isinstance(message, Mapping) for message in messages)):
            raise InvalidRequestError("messages must be a list of dicts.", parameter="messages")
        if not messages:
            raise InvalidRequestError("messages must not be empty.", parameter="messages")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt cannot both be true.",
                parameter="continue_final_message",
            )
        if not self._knows_developers:
            messages = [_as_system(message) for message in messages]
        try:
            text = self._template.render(
                messages=messages,
                tools=options.get("tools"),
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **(options.get("template_kwargs") or {}),
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InvalidRequestError(
                f"The chat template cannot render these messages: {error}", parameter="messages"
            ) from error
        return _cut_after_final_message(text, messages[-1]) if continue_final_message else text


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenAI's newer name for the system role, where a template has only the older one."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _cut_after_final_message(text: str, final: Mapping[str, Any]) -> str:
    content = final.get("content")
    content = content.strip() if isinstance(content, str) else ""
    start = text.rfind(content) if content else -1
    if start < 0:
        raise InvalidRequestError(
            "continue_final_message needs a last message whose text the chat template keeps.",
            parameter="continue_final_message",
        )
    return text[: start + len(content)]


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any) -> str:
    """Unlike Jinja's own filter, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().astimezone().strftime(format_)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is plain."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call: Callable[..., Any] = self.call_method
        return jinja2.nodes.CallBlock(call("_inner"), [], [], body).set_lineno(line)

    def _inner(self, caller: Callable[[], str]) -> str:
        return caller()
