"""What a model that pools is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.frontend.prompts import to_prompts
from trioserve.frontend.scoring import score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.config import ResolvedModel
    from trioserve.frontend.engine_slot import EngineSlot
    from trioserve.frontend.pooling import PoolingRequests
    from trioserve.frontend.prompts import PairPrompt, PromptType
    from trioserve.outputs import PoolingRequestOutput, ScoringRequestOutput
    from trioserve.pooling_params import PoolingParams

__all__ = ["PoolingHandle"]


class PoolingHandle:
    """A base of `AsyncLLM`. What the model has of it is in `llm.model.tasks`; asking for anything else raises
    InvalidRequestError, which says what there is."""

    model: ResolvedModel
    _engine: EngineSlot
    _pooling: PoolingRequests
    """Set on entering."""

    async def encode(
        self,
        prompt: PromptType | PairPrompt,
        params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        prompt_name: str | None = None,
    ) -> PoolingRequestOutput:
        """What the model makes of one text, or of a pair of texts; see `encode_many`."""
        (output,) = await self.encode_many(
            [prompt], params, request_id=request_id, priority=priority, prompt_name=prompt_name
        )
        return output

    async def encode_many(
        self,
        prompts: Sequence[PromptType | PairPrompt],
        params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """The results of all prompts, in their order. They are one request: cancelling it ends all of them in
        the engine, before its next step, and so does the first one that fails.

        Args:
          params: by default, the model's most usual task.
          request_id: a name for `abort`; made up if not given. The outputs of several prompts have their
            number behind it.
          prompt_name: which of the model's own prompts (`model.pooler.prompts`) goes before each text; None:
            the model's default one; "": none.

        Raises:
          InvalidRequestError: the model does not have the task, or a prompt or the parameters cannot be
            served.
          EngineGenerateError: a text failed inside the engine, or the request was aborted by its name.
          EngineDeadError: the engine core is gone.
          OverloadedError: there are too many requests; or EngineRestartingError, which is one.
        """
        self._engine.get_client()
        inputs = self._pooling.inputs
        fitted = inputs.fit_params(params)
        texts = [inputs.with_instruction(prompt, prompt_name) for prompt in prompts]
        return await self._pooling.encode(texts, fitted, request_id=request_id, priority=priority)

    async def score(
        self,
        queries: PromptType | Sequence[PromptType],
        documents: PromptType | Sequence[PromptType],
        params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> list[ScoringRequestOutput]:
        """How well each document fits: its own query, or the only one.

        What the score is depends on the model: of a cross-encoder its one label's, of embeddings their
        cosine (or the similarity that its files name), of token embeddings MaxSim. `params.task` chooses,
        where there are several. A truncation of a text holds for the pair, where a model looks at both
        together.

        Raises as `encode_many`, and InvalidRequestError also if there are not as many queries as documents.
        """
        self._engine.get_client()
        return await score(
            self._pooling,
            self.model,
            to_prompts(queries),
            to_prompts(documents),
            params,
            request_id=request_id,
            priority=priority,
        )
