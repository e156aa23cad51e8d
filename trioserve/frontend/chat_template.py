"""From a conversation to the text that the model was trained to continue.

Models bring a Jinja template. It is rendered in a sandbox, with the few helpers that templates written for
transformers count on (https://huggingface.co/docs/transformers/chat_templating).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

import attrs
import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from trioserve.errors import InvalidRequestError
from trioserve.frontend.template_limits import TemplateLimitError, rendering_limits
from trioserve.frontend.template_operations import join_texts
from trioserve.frontend.template_sandbox import TemplateEnvironment

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from trioserve.frontend.tokenizer import Tokenizer

__all__ = ["MAX_FOREIGN_SOURCE", "ChatOptions", "ChatTemplate"]

MAX_FOREIGN_SOURCE = 32 * 2**10
"""Characters of a template that a request brings."""

_MAX_FOREIGN_CODE = 128 * 2**10
"""Characters of Python that Jinja may make of it; Python compiles so much in some 60 ms, without a pause."""

_MAX_CACHED = 16
"""Compiled templates that are kept, those of requests among them: at most some MiB in all."""

_MAX_TIME_FORMAT = 100
_MAX_REASON = 1000
"""Characters of an error's text, which may be the template's."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


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
    chat_template: str | None
    """Another template than the model's."""


@attrs.frozen
class ChatTemplate:
    """A template, compiled when it is first rendered.

    Rendering one is bounded (see `template_limits`), whatever the template does and the messages are.
    """

    _source: str
    _bos_token: str | None = attrs.field(kw_only=True)
    _eos_token: str | None = attrs.field(kw_only=True)
    _is_foreign: bool = attrs.field(default=False, kw_only=True)
    """A request's own: then it is the template that is at fault, and not the messages."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The one that the model brings, if any."""
        if tokenizer.chat_template is None:
            return None
        return cls(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)

    @classmethod
    def foreign(cls, source: str, tokenizer: Tokenizer) -> ChatTemplate:
        """One that a request brings.

        Raises:
          InvalidRequestError: it is too long.
        """
        if len(source) > MAX_FOREIGN_SOURCE:
            raise InvalidRequestError(
                f"chat_template must have at most {MAX_FOREIGN_SOURCE} characters, got {len(source)}.",
                parameter="chat_template",
            )
        return cls(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token, is_foreign=True)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, yields: bool = False, **options: Unpack[ChatOptions]
    ) -> str:
        """The prompt for these messages. Takes `MAX_RENDER_SECONDS` at most; with `yields`, it lets other
        threads run now and then.

        Raises:
          InvalidRequestError: the template refuses the messages, takes too much time or memory, or is wrong,
            or the options contradict each other.
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
        if "developer" not in self._source:
            messages = [_as_system(message) for message in messages]
        with self._explained(), rendering_limits(yields=yields):
            text = _compile(self._source, self._is_foreign).render(
                messages=messages,
                tools=options.get("tools"),
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos_token or "",
                eos_token=self._eos_token or "",
                **(options.get("template_kwargs") or {}),
            )
        return _cut_after_final_message(text, messages[-1]) if continue_final_message else text

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Whatever is wrong is the request's fault, and told without internals."""
        try:
            yield
        except Exception as error:  # whatever Python raises for what the template does
            what = "chat_template" if self._is_foreign else "messages"
            message = f"The chat template cannot render these messages: {_reason(error)}"
            raise InvalidRequestError(message, parameter=what) from error


def _reason(error: Exception) -> str:
    match error:
        case RecursionError():
            return "it is nested too deeply."
        case SyntaxError() | MemoryError():
            return "it is too complex."
        case jinja2.TemplateSyntaxError():
            text = f"line {error.lineno}: {error.message}"
        case _:
            text = str(error)
    text = _ADDRESS.sub("", text)
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."


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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, without escapes for HTML."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return join_texts(encoder.iterencode(value))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_TIME_FORMAT:
        raise TemplateLimitError(f"strftime_now takes at most {_MAX_TIME_FORMAT} characters")
    return datetime.now().astimezone().strftime(form)


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


@cache
def _environment(is_foreign: bool) -> TemplateEnvironment:
    return TemplateEnvironment(
        extensions=[_GenerationBlock, jinja2.ext.LoopControlExtension],
        filters={"tojson": _to_json},
        functions={"raise_exception": _raise_exception, "strftime_now": _strftime_now},
        max_code=_MAX_FOREIGN_CODE if is_foreign else None,
    )


@lru_cache(maxsize=_MAX_CACHED)
def _compile(source: str, is_foreign: bool) -> jinja2.Template:
    return _environment(is_foreign).from_string(source)
