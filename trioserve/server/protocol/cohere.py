"""POST /v2/embed, as Cohere has it: the request and the answer."""

from __future__ import annotations

from typing import Literal

import attrs
from msgspec import UNSET, UnsetType

from trioserve.errors import InvalidRequestError

__all__ = [
    "ApiVersion",
    "BilledUnits",
    "CohereEmbedRequest",
    "CohereEmbeddings",
    "CohereInput",
    "CohereMeta",
    "EmbeddingType",
    "EmbeddingsByType",
]

EmbeddingType = Literal["float", "binary", "ubinary", "base64"]
"""ubinary: one bit per value, 1 where it is above 0, the first value in the highest bit of the first byte.
binary: the same bytes less 128. base64: of float32."""


@attrs.frozen(kw_only=True)
class CohereContent:
    """A part of an input; only text is served."""

    type: Literal["text"]
    text: str


@attrs.frozen(kw_only=True)
class CohereInput:
    content: list[CohereContent]

    @property
    def text(self) -> str:
        """Parts are joined by line breaks."""
        return "\n".join(part.text for part in self.content)


@attrs.frozen(kw_only=True)
class CohereEmbedRequest:
    """None always means "not given"."""

    model: str | None = None
    texts: list[str] | None = None
    inputs: list[CohereInput] | None = None
    """The other way of giving texts."""
    input_type: str | None = None
    """What the texts are for, such as search_query: the name of one of the model's prompts, which is put
    before each text."""
    output_dimension: int | None = None
    """As `dimensions` elsewhere."""
    embedding_types: list[EmbeddingType] | None = None
    """None: float."""
    truncate: Literal["NONE", "START", "END"] | None = None
    """Where a text that is too long is cut; NONE: it is refused. None: END."""
    max_tokens: int | None = None
    """So many are kept of a text, at most; None: as many as the model takes."""
    priority: int | None = None
    request_id: str | None = None
    timeout: float | None = None
    """Seconds that the request may take, from its headers to its last byte."""

    @property
    def given_texts(self) -> list[str]:
        if self.texts is not None:
            return self.texts
        return [given.text for given in self.inputs or ()]

    @property
    def source(self) -> Literal["texts", "inputs"]:
        """The field that holds the texts."""
        return "inputs" if self.texts is None else "texts"

    @property
    def types(self) -> list[EmbeddingType]:
        """Each once, in a fixed order."""
        return sorted(set(self.embedding_types or ["float"]))

    def max_length(self, room: int) -> int:
        """Tokens of a text, by a model that takes `room`.

        Raises:
          InvalidRequestError: more are to be kept than that.
        """
        if self.max_tokens is not None and self.max_tokens > room:
            raise InvalidRequestError(
                f"max_tokens must be at most {room}, which is what this model takes, got {self.max_tokens}.",
                parameter="max_tokens",
            )
        return self.max_tokens or room


_Values = list[list[float]]  # below, `float` is a field

_Bytes = list[list[int]]


@attrs.frozen(kw_only=True)
class EmbeddingsByType:
    """One entry per text; types that were not asked for are left out."""

    base64: list[bytes] | UnsetType = UNSET
    binary: _Bytes | UnsetType = UNSET
    float: _Values | UnsetType = UNSET
    ubinary: _Bytes | UnsetType = UNSET


@attrs.frozen
class ApiVersion:
    version: str = "2"


@attrs.frozen
class BilledUnits:
    input_tokens: int


@attrs.frozen
class CohereMeta:
    billed_units: BilledUnits
    api_version: ApiVersion = attrs.field(factory=ApiVersion)


@attrs.frozen(kw_only=True)
class CohereEmbeddings:
    id: str
    response_type: str = "embeddings_by_type"
    embeddings: EmbeddingsByType
    texts: list[str]
    meta: CohereMeta
