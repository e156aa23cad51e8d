"""What offline code asks of a model that pools: embeddings, classes, scores."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.frontend.arguments import check_type
from trioserve.frontend.prompts import (
    AudioPrompt,
    PairPrompt,
    TextPrompt,
    TokensPrompt,
    Truncation,
    parse_prompt,
    to_prompts,
)
from trioserve.frontend.scoring import check_lengths
from trioserve.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
)
from trioserve.pooling_params import PoolingParams
from trioserve.progress_bar import ProgressBar
from trioserve.validators import shown

if TYPE_CHECKING:
    from trioserve.async_llm import AsyncLLM
    from trioserve.frontend.prompts import PromptType
    from trioserve.llm_engine import LLMEngine
    from trioserve.outputs import PooledRequestOutput, PoolingRequestOutput, ScoringRequestOutput
    from trioserve.progress_bar import UseTqdm
    from trioserve.tasks import PoolingTask

__all__ = ["PoolingMethods"]

_BATCH_SIZE = 64
"""Texts of one request to the engine."""
_NUM_BATCHES = 4
"""Requests at a time, so that the engine always has work."""

Prompt = TextPrompt | TokensPrompt | PairPrompt | AudioPrompt
T = TypeVar("T")
Output = TypeVar("Output", bound="PooledRequestOutput[Any]")


class PoolingMethods:
    """A base of `LLM`. All results come in the order of the prompts. If a method raises, all of its requests
    are over; Ctrl-C ends them, too.

    Raises everywhere:
      ValueError: there are not as many params or priorities as prompts.
      TypeError: a prompt has none of the known forms.
      InvalidRequestError, which is a ValueError: the model does not have the task (the message says which it
        has), or a prompt or the parameters cannot be served.
      EngineGenerateError: a text failed inside the engine.
      EngineDeadError: the engine core has died. If it is restarted (`engine_restart`), the next call waits
        until the new one is ready.
      ClosedError: this object was closed.
    """

    _engine: LLMEngine
    _ids: Iterator[int]

    def encode(
        self,
        prompts: PromptType | PairPrompt | Sequence[PromptType | PairPrompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        pooling_task: PoolingTask | None = None,
        priority: Sequence[int] | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        """What the model makes of each prompt.

        Args:
          pooling_params: for all prompts, or one for each.
          pooling_task: the task, where the params do not say it; by default the model's most usual one.
          priority: one for each prompt.
          prompt_name: which of the model's own prompts goes before each text; None: its default one; "":
            none.
          truncate_prompt_tokens: of longer texts only so many tokens are left, the first ones (-1: as many as
            the model takes); by default, a text that is too long is an error.
        """
        given = cast("Sequence[PromptType | PairPrompt]", to_prompts(cast("PromptType", prompts)))
        limit = self._limit(truncate_prompt_tokens)
        all_prompts = [_truncated(prompt, limit) for prompt in given]
        all_params = _one_each("pooling_params", pooling_params, PoolingParams(), len(all_prompts))
        all_params = [_with_task(own, pooling_task) for own in all_params]
        priorities = _one_each("priority", priority, 0, len(all_prompts))
        batches = list(self._batches(all_prompts, all_params, priorities))

        async def ask(llm: AsyncLLM, batch: _Batch) -> list[PoolingRequestOutput]:
            return await llm.encode_many(
                batch.prompts, batch.params, priority=batch.priority, prompt_name=prompt_name
            )

        return self._ask_all(ask, batches, len(all_prompts), use_tqdm)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        priority: Sequence[int] | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Each text as a vector. The arguments are those of `encode`."""
        pooled = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="embed",
            priority=priority,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return [
            EmbeddingRequestOutput(
                request_id=output.request_id,
                outputs=EmbeddingOutput(output.outputs.data.tolist()),
                prompt_token_ids=output.prompt_token_ids,
            )
            for output in pooled
        ]

    def classify(
        self,
        prompts: PromptType | PairPrompt | Sequence[PromptType | PairPrompt],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        priority: Sequence[int] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """How likely each label is for each text. The arguments are those of `encode`."""
        pooled = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="classify",
            priority=priority,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return [
            ClassificationRequestOutput(
                request_id=output.request_id,
                outputs=ClassificationOutput(output.outputs.data.tolist()),
                prompt_token_ids=output.prompt_token_ids,
            )
            for output in pooled
        ]

    def score(
        self,
        data_1: PromptType | Sequence[PromptType],
        data_2: PromptType | Sequence[PromptType],
        /,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each text of `data_2` fits its own one of `data_1`, or the only one; see
        `AsyncLLM.score`. A truncation holds for a pair, where the model looks at both together."""
        limit = self._limit(truncate_prompt_tokens)
        queries = [_truncated_text(prompt, limit) for prompt in to_prompts(data_1)]
        documents = [_truncated_text(prompt, limit) for prompt in to_prompts(data_2)]
        check_lengths(len(queries), len(documents))
        size = self._batch_size
        starts = range(0, len(documents), size)

        async def ask(llm: AsyncLLM, start: int) -> list[ScoringRequestOutput]:
            own = queries if len(queries) == 1 else queries[start : start + size]
            return await llm.score(own, documents[start : start + size], pooling_params)

        return self._ask_all(ask, starts, len(documents), use_tqdm)

    def _ask_all(
        self,
        ask: Callable[[AsyncLLM, T], Awaitable[list[Output]]],
        batches: Sequence[T],
        num_texts: int,
        use_tqdm: UseTqdm,
    ) -> list[Output]:
        with ProgressBar(num_texts, use_tqdm) as progress:

            def advance(outputs: list[Output]) -> None:
                progress.count(len(outputs), sum(len(output.prompt_token_ids) for output in outputs), 0)

            results = self._engine.run_all(ask, batches, limit=_NUM_BATCHES, on_result=advance)
        return [
            attrs.evolve(output, request_id=str(next(self._ids))) for outputs in results for output in outputs
        ]

    @property
    def _batch_size(self) -> int:
        return min(_BATCH_SIZE, self._engine.config.scheduler.max_num_seqs)

    def _batches(
        self, prompts: Sequence[Prompt], params: Sequence[PoolingParams], priorities: Sequence[int]
    ) -> Iterator[_Batch]:
        """Neighbours with the same parameters and priority."""
        texts = zip(prompts, params, priorities, strict=True)
        for (own, priority), group in groupby(texts, key=operator.itemgetter(1, 2)):
            while batch := [prompt for prompt, *_ in islice(group, self._batch_size)]:
                yield _Batch(batch, own, priority)

    def _limit(self, wanted: int | None) -> int | None:
        """`truncate_prompt_tokens` in tokens; None: nothing is cut."""
        if wanted is None:
            return None
        most = self._engine.model.max_model_len
        is_integer = isinstance(wanted, int) and not isinstance(wanted, bool)
        if not is_integer or not (wanted == -1 or 1 <= wanted <= most):
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be -1 or an integer from 1 to {most}, the model's context, got "
                f"{shown(wanted)}.",
                parameter="truncate_prompt_tokens",
            )
        return most if wanted == -1 else wanted


@attrs.frozen
class _Batch:
    prompts: Sequence[Prompt]
    params: PoolingParams
    priority: int


def _truncated(prompt: PromptType | PairPrompt, limit: int | None) -> Prompt:
    if isinstance(prompt, PairPrompt):
        return prompt if limit is None else attrs.evolve(prompt, truncation=_beginning(limit))
    return _truncated_text(prompt, limit)


def _truncated_text(prompt: PromptType, limit: int | None) -> TextPrompt | TokensPrompt | AudioPrompt:
    parsed = parse_prompt(prompt)
    if limit is None or isinstance(parsed, AudioPrompt):  # that is refused later
        return parsed
    if isinstance(parsed, TokensPrompt):
        return attrs.evolve(parsed, token_ids=parsed.token_ids[:limit])
    return attrs.evolve(parsed, truncation=_beginning(limit))


def _beginning(limit: int) -> Truncation:
    return Truncation(limit, keeps_end=False)


def _with_task(params: PoolingParams, task: PoolingTask | None) -> PoolingParams:
    check_type("pooling_params", params, PoolingParams)
    if task is None or params.task == task:
        return params
    if params.task is not None:
        raise InvalidRequestError(
            f"pooling_params.task must be not set or {task!r} here, got {params.task!r}.", parameter="task"
        )
    return attrs.evolve(params, task=task)


def _one_each(name: str, given: T | Sequence[T] | None, default: T, number: int) -> Sequence[T]:
    """One for each prompt: those that are given, or the only one, or the default."""
    if given is None or not isinstance(given, Sequence):
        return [default if given is None else given] * number
    if len(given) != number:
        raise ValueError(f"The lengths of prompts ({number}) and {name} ({len(given)}) must be the same.")
    return given
