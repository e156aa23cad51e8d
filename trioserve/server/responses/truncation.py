"""`truncation: "auto"`: a conversation that is too long loses its beginning, message by message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.server.protocol.chat import ChatCompletionRequest
    from trioserve.server.protocol.messages import ChatMessage
    from trioserve.server.tokenizing import TextEncoder
    from trioserve.server.turns import Turns

__all__ = ["count_tokens", "truncate"]


async def count_tokens(request: ChatCompletionRequest, turns: Turns, encoder: TextEncoder) -> int:
    """Tokens of the prompt.

    Raises:
      InvalidRequestError: the template refuses it.
    """
    plan = await turns.plan(request, "")
    return len(await encoder.encode_prompt(plan.generation.prompts[0]))


async def truncate(
    request: ChatCompletionRequest, turns: Turns, encoder: TextEncoder
) -> ChatCompletionRequest:
    """The request with as few messages dropped as its context demands. System messages and the last message
    stay, and so does a prompt that is too long with these alone.

    Raises as `count_tokens`.
    """
    room = turns.service.llm.model.max_model_len - (request.token_limit or 1)

    async def fits(number: int) -> bool:
        shorter = attrs.evolve(request, messages=_without(request.messages, number))
        return await count_tokens(shorter, turns, encoder) <= room

    if await fits(0):
        return request
    # Bisection: too few are dropped at `low`, enough at `high`, which is all that may be.
    low, high = 0, _num_droppable(request.messages)
    while high - low > 1:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle
    return attrs.evolve(request, messages=_without(request.messages, high))


def _num_droppable(messages: Sequence[ChatMessage]) -> int:
    return sum(message.role != "system" for message in messages[:-1])


def _without(messages: Sequence[ChatMessage], number: int) -> list[ChatMessage]:
    """Without the first `number` of those that may go, and without answers of tools whose call is gone."""
    kept: list[ChatMessage] = []
    is_at_beginning = number > 0
    for index, message in enumerate(messages):
        is_last = index == len(messages) - 1
        if message.role == "system" or is_last:
            kept.append(message)
        elif number:
            number -= 1
        elif is_at_beginning and message.role == "tool":
            continue
        else:
            is_at_beginning = False
            kept.append(message)
    return kept
