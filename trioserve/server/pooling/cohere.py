"""POST /v2/embed, Cohere's way of asking for embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.errors import InvalidRequestError
from trioserve.frontend.prompts import TextPrompt, Truncation
from trioserve.pooling_params import PoolingParams
from trioserve.server.errors import naming
from trioserve.server.pooling.naming import naming_prompts
from trioserve.server.pooling.number_replies import count_tokens
from trioserve.server.pooling.replies import encode_each, large_json_reply
from trioserve.server.pooling.requests import PoolingRequests
from trioserve.server.protocol.cohere import (
    BilledUnits,
    CohereEmbeddings,
    CohereMeta,
    EmbeddingsByType,
)
from trioserve.server.protocol.lists import shorten
from trioserve.server.protocol.pooling_readers import COHERE_EMBED_READER

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Sequence

    from quart import Response

    from trioserve.outputs import PoolingRequestOutput
    from trioserve.server.framing import ReplyHead
    from trioserve.server.protocol.cohere import CohereEmbedRequest, EmbeddingType

__all__ = ["CohereEmbed"]

_PROMPT_NAMES = {
    "search_query": ("query",),
    "search_document": ("document", "passage", "corpus"),
    "classification": (),
    "clustering": (),
}
"""Cohere's input types, and what else models call their prompts for these."""


@attrs.frozen(eq=False)
class CohereEmbed:
    """The handler."""

    _requests: PoolingRequests

    async def create(self) -> Response:
        request, head = await self._requests.receive(COHERE_EMBED_READER, "embd")
        outputs = await self._embed(request, head)
        types = request.types
        answer = CohereEmbeddings(
            id=head.id,
            embeddings=EmbeddingsByType(**{kind: [] for kind in types}),
            texts=request.given_texts,
            meta=CohereMeta(BilledUnits(count_tokens(outputs).prompt_tokens)),
        )
        values = [output.outputs.data for output in outputs]
        return large_json_reply(answer, {kind: encode_each(await _written(kind, values)) for kind in types})

    async def _embed(self, request: CohereEmbedRequest, head: ReplyHead) -> Sequence[PoolingRequestOutput]:
        llm = self._requests.llm
        llm.check_room(len(request.given_texts))
        params = PoolingParams(task="embed", dimensions=request.output_dimension)
        self._check_bits(request)
        truncation = self._truncation(request)
        prompts = [TextPrompt(text, truncation=truncation) for text in request.given_texts]
        with naming({"dimensions": "output_dimension"}), naming_prompts(request.source):
            return await llm.encode_many(
                prompts,
                params,
                request_id=head.id,
                priority=request.priority or 0,
                prompt_name=self._prompt_name(request.input_type),
            )

    def _truncation(self, request: CohereEmbedRequest) -> Truncation | None:
        most = request.max_length(self._requests.llm.model.max_model_len)
        if request.truncate == "NONE":
            return None
        return Truncation(most, keeps_end=request.truncate == "START")

    def _check_bits(self, request: CohereEmbedRequest) -> None:
        """Values that are packed into bytes fill them."""
        pooler = self._requests.llm.model.pooler
        size = request.output_dimension or (pooler.hidden_size if pooler is not None else 0)
        if size % 8 and not {"binary", "ubinary"}.isdisjoint(request.types):
            raise InvalidRequestError(
                f"embedding_types binary and ubinary need a multiple of 8 values per text, got {size}.",
                parameter="embedding_types",
            )

    def _prompt_name(self, input_type: str | None) -> str | None:
        """The model's prompt for this type; None: its default one. Cohere's own types are taken by models
        without prompts, too."""
        if input_type is None:
            return None
        pooler = self._requests.llm.model.pooler
        prompts = {} if pooler is None else pooler.prompts
        found = [name for name in (input_type, *_PROMPT_NAMES.get(input_type, ())) if name in prompts]
        if not found and input_type not in _PROMPT_NAMES:
            allowed = ", ".join(sorted({*_PROMPT_NAMES, *prompts}))
            raise InvalidRequestError(
                f"input_type must be one of {allowed}, got {shorten(input_type)}.", parameter="input_type"
            )
        return found[0] if found else None


async def _written(kind: EmbeddingType, values: Sequence[array[float]]) -> Iterable[object]:
    """One entry per text."""
    match kind:
        case "float":
            return (row.tolist() for row in values)
        case "base64":
            return (row.tobytes() for row in values)
        case "binary" | "ubinary":
            packed = await trio.to_thread.run_sync(_pack_signs, values)
            less = 128 if kind == "binary" else 0
            return ([byte - less for byte in row] for row in packed)


def _pack_signs(values: Sequence[array[float]]) -> list[bytes]:
    from trioserve.server.pooling.narrow_numbers import pack_signs  # noqa: PLC0415 - see there

    return [pack_signs(row) for row in values]
