"""For the tests of the routes of pooling: a model that pools, in the place of the engine."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any

import attrs
import trio

from helpers_api import FakeLLM, FakeTokenizer
from trioserve.config import Pooler
from trioserve.errors import InvalidRequestError
from trioserve.frontend.prompts import TextPrompt
from trioserve.outputs import PoolingOutput, PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from trioserve.pooling_params import PoolingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trioserve.tasks import Task

__all__ = ["SIZE", "FakePoolingLLM", "PoolingCall", "number_of", "values_of"]

SIZE = 8
"""Values of an embedding."""
LABELS = ("bad", "good")


@attrs.frozen
class PoolingCall:
    """What reached the engine."""

    prompts: list[Any]
    params: PoolingParams
    request_id: str
    priority: int
    prompt_name: str | None = None


def tokens_of(prompt: Any) -> list[int]:
    """One per word; of token ids, these."""
    return [7] * len(prompt.text.split()) if isinstance(prompt, TextPrompt) else list(prompt)


def number_of(prompt: Any) -> int:
    """Tells prompts from each other."""
    return len(prompt.text) if isinstance(prompt, TextPrompt) else sum(prompt)


def values_of(number: int, size: int = SIZE) -> array[float]:
    """The embedding of the prompt with that number: each value is exactly a float16."""
    return array("f", [(number - index) / 4 for index in range(size)])


class FakePoolingTokenizer(FakeTokenizer):
    def beginnings(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        return [" ".join(text.split()[:max_tokens]) for text in texts]


class FakePoolingLLM(FakeLLM):
    """`AsyncLLM` as the routes of pooling see it: what it makes of a text depends on its length."""

    def __init__(
        self, *tasks: Task, pooler: Pooler | None = None, waits: Callable[[], Any] | None = None
    ) -> None:
        """waits: called, and awaited, before there are results."""
        super().__init__()
        self.model = attrs.evolve(
            self.model,
            runner="pooling",
            tasks=tasks or ("embed", "token_embed", "score"),
            pooler=pooler or Pooler(pooling_type="mean", hidden_size=SIZE, labels=LABELS),
        )
        self.tokenizer = FakePoolingTokenizer()
        self.pooled: list[PoolingCall] = []
        self.scored: list[tuple[PoolingCall, PoolingCall]] = []
        self._waits = waits

    async def encode_many(
        self, prompts: Sequence[Any], params: PoolingParams, *, request_id: str, priority: int = 0,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput]:  # fmt: skip
        call = PoolingCall(list(prompts), params, request_id, priority, prompt_name)
        task = params.task or next(task for task in self.model.tasks if task != "score")
        if task not in self.model.tasks:
            raise InvalidRequestError(f"This model does not support task {task!r}.", parameter="task")
        if params.dimensions is not None and not params.dimensions < SIZE - 1:
            raise InvalidRequestError("dimensions must be another.", parameter="dimensions")
        self._check(prompts)
        self.pooled.append(call)
        await self._run(request_id)
        return [
            PoolingRequestOutput(
                request_id=f"{request_id}-{index}",
                outputs=_result(task, prompt, params),
                prompt_token_ids=tokens_of(prompt),
            )
            for index, prompt in enumerate(prompts)
        ]

    async def score(
        self, queries: Sequence[Any], documents: Sequence[Any], params: PoolingParams, *, request_id: str,
        priority: int = 0,
    ) -> list[ScoringRequestOutput]:  # fmt: skip
        """How near the lengths of two texts are. The query of many documents is computed once."""
        self._check([*queries, *documents])
        calls = [PoolingCall(list(side), params, request_id, priority) for side in (queries, documents)]
        self.scored.append((calls[0], calls[1]))
        await self._run(request_id)
        outputs = []
        for index, document in enumerate(documents):
            query = queries[0 if len(queries) == 1 else index]
            known = len(tokens_of(query)) if index and len(queries) == 1 else 0
            outputs.append(
                ScoringRequestOutput(
                    request_id=request_id,
                    outputs=ScoringOutput(1 / (1 + abs(number_of(query) - number_of(document)))),
                    prompt_token_ids=tokens_of(query) + tokens_of(document),
                    num_cached_tokens=known,
                )
            )
        return outputs

    def _check(self, prompts: Sequence[Any]) -> None:
        for prompt in prompts:
            if isinstance(prompt, list) and not 0 <= min(prompt) <= max(prompt) < 10:
                raise InvalidRequestError("The prompt has unknown tokens.", parameter="prompt")

    async def _run(self, request_id: str) -> None:
        self.running.add(request_id)
        try:
            await trio.lowlevel.checkpoint()
            if self._waits is not None:
                await self._waits()
        finally:
            self.running.remove(request_id)


def _result(task: str, prompt: Any, params: PoolingParams) -> PoolingOutput:
    number = number_of(prompt)
    if task == "classify":
        good = 1 / (1 + math.exp(-number)) if params.use_activation is not False else float(number)
        return PoolingOutput(array("f", [1 - good, good]))
    size = params.dimensions or SIZE
    if task == "embed":
        return PoolingOutput(values_of(number, size))
    rows = len(tokens_of(prompt))
    return PoolingOutput(values_of(number, size) * rows, rows)
