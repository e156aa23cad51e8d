"""Conversations to prompts, without holding up the event loop."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from trioserve.errors import InvalidRequestError
from trioserve.frontend.chat_template import ChatTemplate
from trioserve.frontend.template_limits import TemplateLimitError, text_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Unpack

    from trioserve.frontend.chat_template import ChatOptions
    from trioserve.frontend.tokenizer import Tokenizer

__all__ = ["ChatRenderer"]

_LARGE = 2**16
"""Size (`text_size`) of a conversation that is rendered in a thread: about a millisecond's work."""


class ChatRenderer:
    """Renders with the model's template, or with one that a request brings."""

    def __init__(self, tokenizer: Tokenizer, model_name: str) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._own = ChatTemplate.of(tokenizer)
        # Threads share one GIL: a second one would not make it faster, and take turns with the loop twice.
        self._in_thread = trio.CapacityLimiter(1)

    async def render(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> str:
        """The prompt. A checkpoint; small conversations with the model's own template are rendered here and
        now, all others in a thread, one at a time, whose end (a second at most) a cancellation waits for.

        Raises:
          InvalidRequestError: the model has no chat template, or the template refuses the messages, is wrong,
            or takes too much time or memory.
        """
        source = options.get("chat_template")
        template = self._own if source is None else ChatTemplate.foreign(source, self._tokenizer)
        if template is None:
            raise InvalidRequestError(
                f"{self._model_name} has no chat template; use completions instead.", parameter="messages"
            )
        if source is None and _is_small(messages, options):
            await trio.lowlevel.checkpoint()
            return template.render(messages, **options)
        render = partial(template.render, messages, yields=True, **options)
        return await trio.to_thread.run_sync(render, limiter=self._in_thread)


def _is_small(messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> bool:
    try:
        return text_size([messages, options.get("tools"), options.get("template_kwargs")]) <= _LARGE
    except TemplateLimitError:
        return False
