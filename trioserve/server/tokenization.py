"""POST /tokenize, POST /detokenize and GET /tokenizer_info."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import trio

from trioserve.errors import InvalidRequestError
from trioserve.server.errors import naming
from trioserve.server.protocol.tokenization import (
    DETOKENIZE_READER,
    TOKENIZE_READER,
    Detokenized,
    Tokenized,
)
from trioserve.server.replies import json_reply
from trioserve.server.tokenizing import TextEncoder
from trioserve.server.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quart import Response

    from trioserve.server.protocol.tokenization import TokenizeRequest

__all__ = ["Tokenization"]

_MANY_TOKENS = 10_000
"""From here on, ids become text in a thread: some milliseconds' work."""


@attrs.frozen(eq=False)
class Tokenization:
    """The handlers. Nothing here asks the engine, so no limit of requests counts it."""

    _turns: Turns
    _encoder: TextEncoder
    # One at a time: it takes a core.
    _limiter: trio.CapacityLimiter = attrs.field(init=False, factory=lambda: trio.CapacityLimiter(1))

    async def tokenize(self) -> Response:
        service = self._turns.service
        request = await service.read_request(TOKENIZE_READER)
        service.check_model(request.model)
        token_ids = await self._token_ids(request)
        spelling = service.llm.tokenizer.spelling
        return json_reply(
            Tokenized(
                count=len(token_ids),
                max_model_len=service.llm.model.max_model_len,
                tokens=token_ids,
                token_strs=[spelling(token) for token in token_ids] if request.return_token_strs else None,
            )
        )

    async def _token_ids(self, request: TokenizeRequest) -> Sequence[int]:
        if request.prompt is not None:
            return await self._encoder.encode(
                request.prompt, add_special_tokens=request.add_special_tokens is not False
            )
        with naming({"prompt": "messages"}):
            plan = await self._turns.plan(request.chat(), "tokenize")
            (prompt,) = plan.generation.prompts
            return await self._encoder.encode_prompt(prompt)

    async def detokenize(self) -> Response:
        service = self._turns.service
        request = await service.read_request(DETOKENIZE_READER)
        service.check_model(request.model)
        self._check_vocabulary(request.tokens)
        decode = partial(service.llm.tokenizer.decode, request.tokens, skip_special_tokens=False)
        if len(request.tokens) < _MANY_TOKENS:
            return json_reply(Detokenized(decode()))
        return json_reply(Detokenized(await trio.to_thread.run_sync(decode, limiter=self._limiter)))

    def _check_vocabulary(self, token_ids: Sequence[int]) -> None:
        size = self._turns.service.llm.model.vocab_size
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < size):
            return
        index, wrong = next((i, token) for i, token in enumerate(token_ids) if not 0 <= token < size)
        raise InvalidRequestError(
            f"tokens[{index}] must be from 0 to {size - 1}, the highest id of the vocabulary, got {wrong}.",
            parameter=f"tokens[{index}]",
        )

    async def info(self) -> Response:
        """What the model's tokenizer_config.json says, with the chat template in use."""
        llm = self._turns.service.llm
        config = await trio.to_thread.run_sync(_read_config, llm.model.tokenizer_directory)
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        return json_reply({**config, "chat_template": llm.tokenizer.chat_template})


def _read_config(directory: str) -> dict[str, Any]:
    path = Path(directory) / "tokenizer_config.json"
    if not path.exists():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
