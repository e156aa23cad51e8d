"""How well texts fit each other: scores of pairs, made of what a model pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs
import trio

from trioserve.errors import InvalidRequestError
from trioserve.frontend.arguments import check_type
from trioserve.frontend.model_tasks import check_task
from trioserve.frontend.prompts import PairPrompt, TextPrompt
from trioserve.outputs import ScoringOutput, ScoringRequestOutput
from trioserve.pooling_params import PoolingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.config import ResolvedModel, Similarity
    from trioserve.frontend.pooling import PoolingRequests
    from trioserve.frontend.pooling_tokenizer import Prompt
    from trioserve.frontend.prompts import PromptType
    from trioserve.outputs import PoolingOutput, PoolingRequestOutput

__all__ = ["check_lengths", "score", "scoring_task"]

ScoringTask = Literal["classify", "embed", "token_embed"]

_VALUES_AT_ONCE = 100_000
"""Numbers that are multiplied in the event loop, in less than a millisecond; more of them in a thread."""


def scoring_task(model: ResolvedModel, wanted: str | None = None) -> ScoringTask:
    """What scores are made of: classify (a cross-encoder, which looks at both texts together), embed (how
    similar two embeddings are) or token_embed (late interaction: MaxSim). The first of the model's tasks, if
    none is wanted.

    Raises:
      InvalidRequestError: the model gives no scores, or not so.
    """
    check_task(model, "score")
    num_labels = 0 if model.pooler is None else len(model.pooler.labels)
    possible: list[ScoringTask] = [
        task
        for task in model.tasks
        if task in {"embed", "token_embed"} or (task == "classify" and num_labels <= 1)
    ]
    for task in possible:
        if wanted in {None, task}:
            return task
    raise InvalidRequestError(
        f"The task that this model's scores are made of must be one of {', '.join(possible) or 'none'}, got "
        f"{wanted!r}.",
        parameter="task",
    )


async def score(
    requests: PoolingRequests,
    model: ResolvedModel,
    queries: Sequence[PromptType],
    documents: Sequence[PromptType],
    params: PoolingParams | None,
    *,
    request_id: str | None,
    priority: int,
) -> list[ScoringRequestOutput]:
    """See `AsyncLLM.score`."""
    params = PoolingParams() if params is None else check_type("params", params, PoolingParams)
    params = attrs.evolve(params, task=scoring_task(model, params.task))
    params = requests.inputs.fit_params(params)
    check_lengths(len(queries), len(documents))
    if params.task == "classify":
        pairs = [
            _to_pair(requests, queries[0 if len(queries) == 1 else index], document)
            for index, document in enumerate(documents)
        ]
        outputs = await requests.encode(pairs, params, request_id=request_id, priority=priority)
        return [_to_score(output, output.prompt_token_ids, output.outputs.data[0]) for output in outputs]
    inputs = requests.inputs
    query_name, document_name = inputs.name_for("query"), inputs.name_for("document", "passage", "corpus")
    prompts: list[Prompt] = [inputs.with_instruction(query, query_name) for query in queries]
    prompts += [inputs.with_instruction(document, document_name) for document in documents]
    outputs = await requests.encode(prompts, params, request_id=request_id, priority=priority)
    similarity = "cosine" if model.pooler is None else model.pooler.similarity
    return await _compare(outputs[: len(queries)], outputs[len(queries) :], similarity)


def check_lengths(num_queries: int, num_documents: int) -> None:
    """
    Raises:
      InvalidRequestError: so many cannot be made into pairs.
    """
    if not num_queries or not num_documents or num_queries not in {1, num_documents}:
        raise InvalidRequestError(
            "There must be one query for all documents, or one for each, and at least one document: got "
            f"{num_queries} queries and {num_documents} documents.",
            parameter="documents",
        )


def _to_pair(requests: PoolingRequests, query: PromptType, document: PromptType) -> PairPrompt:
    texts = []
    for prompt in (query, document):
        parsed = requests.inputs.with_instruction(prompt, "")
        if not isinstance(parsed, TextPrompt):
            raise InvalidRequestError(
                "A cross-encoder scores texts: token ids cannot be made into a pair.", parameter="documents"
            )
        texts.append(parsed)
    first, second = texts
    return PairPrompt(first.text, second.text, second.truncation or first.truncation)


async def _compare(
    queries: Sequence[PoolingRequestOutput],
    documents: Sequence[PoolingRequestOutput],
    similarity: Similarity,
) -> list[ScoringRequestOutput]:
    pairs = [
        (queries[0 if len(queries) == 1 else index], document) for index, document in enumerate(documents)
    ]
    work = sum(_num_products(query.outputs, document.outputs) for query, document in pairs)
    if work < _VALUES_AT_ONCE:
        scores = _scores(pairs, similarity)
    else:
        scores = await trio.to_thread.run_sync(_scores, pairs, similarity)
    outputs = [
        _to_score(document, [*query.prompt_token_ids, *document.prompt_token_ids], value)
        for (query, document), value in zip(pairs, scores, strict=True)
    ]
    if len(queries) == 1:  # embedded once
        known = len(queries[0].prompt_token_ids)
        outputs[1:] = [attrs.evolve(output, num_cached_tokens=known) for output in outputs[1:]]
    return outputs


def _num_products(query: PoolingOutput, document: PoolingOutput) -> int:
    return len(query.data) * (document.num_rows or 1)


def _scores(
    pairs: Sequence[tuple[PoolingRequestOutput, PoolingRequestOutput]], similarity: Similarity
) -> list[float]:
    """The similarity of embeddings, or MaxSim (https://arxiv.org/abs/2004.12832): for each token of the query
    its best product with a token of the document, and the sum of these. In float64."""
    import numpy as np  # noqa: PLC0415 - a tenth of a second, and 20 MB, that other servers do not need

    def rows(output: PoolingOutput) -> np.ndarray:
        values = np.frombuffer(output.data, dtype=np.float32).astype(np.float64)
        return values.reshape(output.num_rows or 1, -1)

    def likeness(query: np.ndarray, document: np.ndarray) -> float:
        match similarity:
            case "cosine":
                return float(query @ document / ((np.linalg.norm(query) * np.linalg.norm(document)) or 1.0))
            case "dot":
                return float(query @ document)
            case "euclidean":
                return -float(np.linalg.norm(query - document))
            case "manhattan":
                return -float(np.abs(query - document).sum())

    return [
        likeness(rows(query.outputs)[0], rows(document.outputs)[0])
        if query.outputs.num_rows is None
        else float((rows(query.outputs) @ rows(document.outputs).T).max(axis=1).sum())
        for query, document in pairs
    ]


def _to_score(output: PoolingRequestOutput, token_ids: Sequence[int], value: float) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        request_id=output.request_id, outputs=ScoringOutput(float(value)), prompt_token_ids=token_ids
    )
