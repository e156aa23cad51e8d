"""POST /score and /rerank, under all their spellings: the requests and the answers."""

from __future__ import annotations

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.server.protocol.messages import ContentPart
from trioserve.server.protocol.pooling_fields import PoolingFields, PromptUsage

__all__ = [
    "QUERY_NAMES",
    "Ranked",
    "RankedDocument",
    "Ranking",
    "RerankRequest",
    "Score",
    "ScoreList",
    "ScoreRequest",
    "ScoredText",
    "plain_text",
]


@attrs.frozen(kw_only=True)
class ScoredText:
    """A text as an object: `{"text": ...}`, or `{"content": [parts]}`."""

    text: str | None = None
    content: list[ContentPart] | None = None

    def __attrs_post_init__(self) -> None:
        if (self.text is None) == (self.content is None):
            raise InvalidRequestError("must have one of text and content", parameter="text")


Texts = str | ScoredText | list[str | ScoredText]


def plain_text(given: str | ScoredText) -> str:
    """Parts are joined by line breaks."""
    if isinstance(given, str):
        return given
    return "\n".join(part.words for part in given.content) if given.content is not None else given.text or ""


@attrs.frozen(kw_only=True)
class PairFields(PoolingFields):
    max_tokens_per_query: int | None = None
    """A longer query is cut to so many tokens before it is paired; None and 0: it is not."""
    max_tokens_per_doc: int | None = None
    """The same of documents."""


QUERY_NAMES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""What the two sides may be called, in pairs."""


@attrs.frozen(kw_only=True)
class ScoreRequest(PairFields):
    """One query and one document, one and many, or as many of both. The two have four pairs of names."""

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None

    @property
    def names(self) -> tuple[str, str] | None:
        """Those that are given; None if they are no pair."""
        given = {name for pair in QUERY_NAMES for name in pair if getattr(self, name) is not None}
        return next((pair for pair in QUERY_NAMES if given == set(pair)), None)

    def side(self, name: str) -> list[str]:
        """The texts under this name."""
        given: Texts = getattr(self, name)
        return [plain_text(text) for text in (given if isinstance(given, list) else [given])]


@attrs.frozen(kw_only=True)
class Score:
    index: int
    object: str = "score"
    score: float


@attrs.frozen(kw_only=True)
class ScoreList:
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


@attrs.frozen(kw_only=True)
class RerankRequest(PairFields):
    query: str | ScoredText
    documents: list[str | ScoredText]
    top_n: int | None = None
    """So many of the best are told; None and 0: all."""
    return_documents: bool | None = None
    """False: the answer is without their texts."""


@attrs.frozen
class RankedDocument:
    text: str


@attrs.frozen(kw_only=True)
class Ranked:
    index: int
    """Among the request's documents."""
    document: RankedDocument | None
    relevance_score: float


@attrs.frozen(kw_only=True)
class Ranking:
    id: str
    model: str
    usage: PromptUsage
    results: list[Ranked]
    """The best first."""
