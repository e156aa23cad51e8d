"""Text from an engine of our own."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import attrs

from trioserve.llm_engine import LLMEngine
from trioserve.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from trioserve.args import EngineArgs
    from trioserve.frontend.prompts import PromptType
    from trioserve.sampling_params import SamplingParams

__all__ = ["LocalSource"]


class LocalSource(AbstractContextManager["LocalSource"]):
    """A `TextSource`; owns an engine from entering to leaving."""

    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        self._ids = itertools.count()

    def __enter__(self) -> Self:
        """Start the engine. Raises as `LLMEngine.from_engine_args` does."""
        self._engine = LLMEngine.from_engine_args(self._args)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.close()

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Generator[str, None, None]:
        prompt = self._engine.render_chat(messages)
        # Unless the model says otherwise, an answer may fill the context.
        limit = self._engine.model.generation.max_new_tokens
        yield from self._generate(prompt, attrs.evolve(self._defaults(), max_tokens=limit))

    def complete(self, prompt: str, max_tokens: int | None) -> Generator[str, None, None]:
        params = self._defaults()
        if max_tokens is not None:
            params = attrs.evolve(params, max_tokens=max_tokens)
        yield from self._generate(prompt, params)

    def _defaults(self) -> SamplingParams:
        return attrs.evolve(self._engine.get_default_sampling_params(), output_kind=RequestOutputKind.DELTA)

    def _generate(self, prompt: PromptType, params: SamplingParams) -> Generator[str, None, None]:
        request_id = str(next(self._ids))
        self._engine.add_request(request_id, prompt, params)
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    yield output.outputs[0].text
        finally:
            self._engine.abort_request(request_id)
