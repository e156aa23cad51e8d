"""POST /v1/completions/render and /v1/chat/completions/render: what the engine would be asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.frontend.prompts import TextPrompt
from trioserve.sampling_params import SamplingParams
from trioserve.server.completion_plan import plan_completions
from trioserve.server.errors import naming
from trioserve.server.protocol.generate import RenderedRequest, TokenSampling
from trioserve.server.protocol.readers import CHAT_READER, COMPLETION_READER
from trioserve.server.replies import json_reply
from trioserve.server.request_scope import limit_request
from trioserve.server.tokenizing import TextEncoder
from trioserve.server.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quart import Response

    from trioserve.frontend.prompts import TokensPrompt
    from trioserve.server.framing import ReplyHead
    from trioserve.server.generation import Generation
    from trioserve.server.protocol.sampling import SamplingFields

__all__ = ["Rendering"]


@attrs.frozen(eq=False)
class Rendering:
    """The handlers. Nothing runs: whether the prompt fits into the context is found out by who runs it."""

    _turns: Turns
    _encoder: TextEncoder

    async def chat(self) -> Response:
        service = self._turns.service
        request = (await service.read_request(CHAT_READER)).simplified()
        limit_request(request.timeout)
        service.check_model(request.model)
        head = service.reply_head("chatcmpl", request.request_id, request.model)
        with naming(request.field_names):
            plan = await self._turns.plan(request, head.id)
            (rendered,) = await self._render(request, head, plan.generation)
        return json_reply(rendered)

    async def completions(self) -> Response:
        service = self._turns.service
        request = await service.read_request(COMPLETION_READER)
        limit_request(request.timeout)
        service.check_model(request.model)
        head = service.reply_head("cmpl", request.request_id, request.model)
        with naming(request.field_names):
            return json_reply(
                await self._render(request, head, plan_completions(service.llm, request, head.id))
            )

    async def _render(
        self, request: SamplingFields, head: ReplyHead, generation: Generation
    ) -> list[RenderedRequest]:
        params = generation.params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                "use_beam_search must be false or null here: a search is many requests.",
                parameter="use_beam_search",
            )
        rendered = []
        for prompt, request_id in zip(generation.prompts, generation.request_ids, strict=True):
            token_ids = await self._encoder.encode_prompt(prompt)
            rendered.append(
                RenderedRequest(
                    request_id=request_id,
                    model=head.model,
                    prompt=_shown(prompt),
                    token_ids=token_ids,
                    sampling_params=TokenSampling.of(params),
                    stream=bool(request.stream),
                    stream_options=request.stream_options,
                    priority=generation.priority,
                    cache_salt=generation.cache_salt,
                )
            )
        return rendered


def _shown(prompt: str | Sequence[int] | TextPrompt | TokensPrompt) -> str | None:
    if isinstance(prompt, TextPrompt):
        return prompt.text if prompt.truncation is None else None
    return prompt if isinstance(prompt, str) else None
