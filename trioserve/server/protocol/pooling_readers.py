"""The readers of the routes of pooling: which ranges, refusals and conflicts hold for their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trioserve.pooling_params import PoolingParams
from trioserve.server.protocol.classification import ClassifyRequest
from trioserve.server.protocol.cohere import CohereEmbedRequest
from trioserve.server.protocol.embeddings import EmbeddingRequest
from trioserve.server.protocol.pooling import PoolingRequest
from trioserve.server.protocol.readers import CHAT_BATCH_READER, CHAT_READER
from trioserve.server.protocol.reading import Problem, RequestReader
from trioserve.server.protocol.refusals import Refusal
from trioserve.server.protocol.scoring import QUERY_NAMES, RerankRequest, ScoreRequest
from trioserve.server.protocol.template_conflicts import template_conflicts
from trioserve.validators import integer, optional

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trioserve.server.protocol.pooling_fields import FormatFields, InputFields

__all__ = [
    "CLASSIFY_READER",
    "COHERE_EMBED_READER",
    "EMBEDDING_READER",
    "MAX_INPUTS",
    "MAX_INPUTS_IN_HEADER",
    "POOLING_READER",
    "RERANK_READER",
    "SCORE_READER",
]

MAX_INPUTS = 2048
"""Texts of one request, as OpenAI has it; each is a request of the engine."""

MAX_INPUTS_IN_HEADER = 128
"""Texts of one request with encoding_format "bytes": a header tells of each in some 120 bytes, and many
clients take no header of more than 16 KiB."""

_PARAMS = attrs.fields_dict(PoolingParams)


def _integer(name: str, allowed: str, least: int) -> attrs.Attribute[Any]:
    return _PARAMS["dimensions"].evolve(name=name, validator=optional(integer(allowed, least)))


_CUT = "an integer >= 1, or 0 for no limit"

_SHARED = {
    "timeout": CHAT_READER.ranges["timeout"],
    "truncate_prompt_tokens": _integer(
        "truncate_prompt_tokens", "an integer >= 1, or -1 for all that the model takes", -1
    ),
}

_DIMENSIONS = {"dimensions": _PARAMS["dimensions"]}

_PAIRS = _SHARED | {name: _integer(name, _CUT, 0) for name in ("max_tokens_per_query", "max_tokens_per_doc")}

_CHAT_ONLY = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")


def _too_many(name: str, given: Sequence[Any], what: str) -> list[Problem]:
    if len(given) <= MAX_INPUTS:
        return []
    return [Problem(name, f"{name} must hold at most {MAX_INPUTS} {what}, got {len(given)}.")]


def _oversized_inputs(values: Mapping[str, Any]) -> list[Problem]:
    given = values.get("input")
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        return _too_many("input", given, "texts")
    messages = values.get("messages")
    is_batch = isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)
    return (CHAT_BATCH_READER if is_batch else CHAT_READER).oversized({"messages": messages})


def _oversized_sides(values: Mapping[str, Any]) -> list[Problem]:
    names = {name for pair in QUERY_NAMES for name in pair}
    return [
        problem
        for name in sorted(names & values.keys())
        if isinstance(values[name], list)
        for problem in _too_many(name, values[name], "texts")
    ]


def _oversized_lists(values: Mapping[str, Any]) -> list[Problem]:
    return [
        problem
        for name, what in (("documents", "documents"), ("texts", "texts"), ("inputs", "texts"))
        if isinstance(values.get(name), list)
        for problem in _too_many(name, values[name], what)
    ]


def _empty_texts(name: str, texts: Sequence[str | list[int]], *, is_list: bool) -> list[Problem]:
    """The first text without anything in it. OpenAI refuses these, and what comes of them means nothing."""
    if not texts:
        return [Problem(name, f"{name} must hold at least one text, got [].")]
    for index, text in enumerate(texts):
        if not text:
            path = f"{name}[{index}]" if is_list else name
            what = "an empty string" if text == "" else "an empty list of tokens"
            return [Problem(path, f"{path} must not be {what}.")]
    return []


def _zero_truncation(request: Any) -> list[Problem]:
    if request.truncate_prompt_tokens != 0:
        return []
    return [Problem("truncate_prompt_tokens", "truncate_prompt_tokens = 0 would leave nothing of the text.")]


def _input_conflicts(request: InputFields) -> list[Problem]:
    problems = _zero_truncation(request)
    if (request.input is None) == (request.messages is None):
        return [*problems, Problem("input", "Exactly one of input and messages must be given.")]
    if request.messages is not None:
        return problems + _conversation_conflicts(request)
    is_list = isinstance(request.input, list) and not (request.input and isinstance(request.input[0], int))
    problems += _empty_texts("input", request.texts, is_list=is_list)
    return problems + [
        Problem(name, f"{name} is only allowed with messages.")
        for name in _CHAT_ONLY
        if getattr(request, name) is not None
    ]


def _conversation_conflicts(request: InputFields) -> list[Problem]:
    problems = []
    if not request.messages or not all(request.conversations):
        problems.append(Problem("messages", "messages must hold at least one message each."))
    return problems + list(template_conflicts(request))


def _format_conflicts(request: FormatFields) -> list[Problem]:
    if request.encoding_format == "bytes" and request.num_inputs > MAX_INPUTS_IN_HEADER:
        sentence = (
            f"encoding_format 'bytes' tells of each text in a header, and so takes at most "
            f"{MAX_INPUTS_IN_HEADER}, got {request.num_inputs}: 'bytes_only' takes them."
        )
        return [Problem("encoding_format", sentence)]
    return []


def _embedding_conflicts(request: FormatFields) -> list[Problem]:
    return _input_conflicts(request) or _format_conflicts(request)


def _pooling_conflicts(request: PoolingRequest) -> list[Problem]:
    if request.dimensions is not None and request.task not in {None, "embed"}:
        sentence = f"dimensions is only allowed with the task embed, got {request.task!r}."
        return [Problem("dimensions", sentence)]
    return _embedding_conflicts(request)


def _score_conflicts(request: ScoreRequest) -> list[Problem]:
    problems = _zero_truncation(request)
    names = request.names
    if names is None:
        pairs = ", ".join(f"{first} and {second}" for first, second in QUERY_NAMES)
        return [*problems, Problem("queries", f"Exactly one of these pairs must be given: {pairs}.")]
    num_queries, num_documents = (len(request.side(name)) for name in names)
    if 0 in {num_queries, num_documents}:
        empty = names[0] if num_queries == 0 else names[1]
        return [*problems, Problem(empty, f"{empty} must hold at least one text, got [].")]
    if num_queries not in {1, num_documents}:
        sentence = (
            f"{names[0]} must hold one text, or as many as {names[1]} ({num_documents}), got {num_queries}."
        )
        problems.append(Problem(names[0], sentence))
    return problems


def _rerank_conflicts(request: RerankRequest) -> list[Problem]:
    problems = _zero_truncation(request)
    if not request.documents:
        problems.append(Problem("documents", "documents must hold at least one document, got []."))
    return problems


def _cohere_conflicts(request: CohereEmbedRequest) -> list[Problem]:
    if (request.texts is None) == (request.inputs is None):
        return [Problem("texts", "Exactly one of texts and inputs must be given.")]
    problems = _empty_texts(request.source, request.given_texts, is_list=True)
    if request.max_tokens is not None and request.truncate == "NONE":
        problems.append(Problem("max_tokens", "max_tokens is only allowed where truncate is START or END."))
    return problems


_IMAGES = Refusal("images", "null or empty", ([],))

_SCORE_REFUSALS = (
    Refusal("instruction", "null"),
    Refusal("chat_template_kwargs", "null or empty", ({},)),
    Refusal("chat_template", "null"),
)

_INPUT_SHAPES = {"input": {"minItems": 1}, "messages": {"minItems": 1}}

EMBEDDING_READER = RequestReader(
    kind=EmbeddingRequest,
    ranges=_SHARED | _DIMENSIONS,
    refusals=(),
    shapes=_INPUT_SHAPES,
    oversized=_oversized_inputs,
    conflicts=_embedding_conflicts,
)

POOLING_READER = RequestReader(
    kind=PoolingRequest,
    ranges=_SHARED | _DIMENSIONS,
    refusals=(),
    shapes=_INPUT_SHAPES,
    oversized=_oversized_inputs,
    conflicts=_pooling_conflicts,
)

CLASSIFY_READER = RequestReader(
    kind=ClassifyRequest,
    ranges=_SHARED,
    refusals=(),
    shapes=_INPUT_SHAPES,
    oversized=_oversized_inputs,
    conflicts=_input_conflicts,
)

SCORE_READER = RequestReader(
    kind=ScoreRequest,
    ranges=_PAIRS,
    refusals=_SCORE_REFUSALS,
    shapes={name: {"minItems": 1, "maxItems": MAX_INPUTS} for pair in QUERY_NAMES for name in pair},
    oversized=_oversized_sides,
    conflicts=_score_conflicts,
)

RERANK_READER = RequestReader(
    kind=RerankRequest,
    ranges=_PAIRS | {"top_n": _integer("top_n", "an integer >= 0", 0)},
    refusals=_SCORE_REFUSALS,
    shapes={"documents": {"minItems": 1, "maxItems": MAX_INPUTS}},
    oversized=_oversized_lists,
    conflicts=_rerank_conflicts,
)

COHERE_EMBED_READER = RequestReader(
    kind=CohereEmbedRequest,
    ranges={
        "timeout": _SHARED["timeout"],
        "output_dimension": _PARAMS["dimensions"].evolve(name="output_dimension"),
        "max_tokens": _integer("max_tokens", "an integer >= 1", 1),
    },
    refusals=(_IMAGES,),
    shapes={name: {"minItems": 1, "maxItems": MAX_INPUTS} for name in ("texts", "inputs")},
    oversized=_oversized_lists,
    conflicts=_cohere_conflicts,
)
