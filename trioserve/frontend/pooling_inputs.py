"""From what a user gives to what an engine that pools takes, with everything checked that can be checked."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.frontend.arguments import check_type
from trioserve.frontend.model_tasks import check_task, pooling_tasks
from trioserve.frontend.pooling_tokenizer import PoolingTokenizer
from trioserve.frontend.prompts import AudioPrompt, PairPrompt, TextPrompt, TokensPrompt, parse_prompt
from trioserve.pooling_params import PoolingParams
from trioserve.validators import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.frontend.input_processor import InputProcessor
    from trioserve.frontend.pooling_tokenizer import PoolingText, Prompt
    from trioserve.frontend.prompts import PromptType
    from trioserve.frontend.tokenizer import Tokenizer

__all__ = ["PoolingInputs"]

_CHARACTERS_AT_ONCE = 50_000
"""Tokenized together, in some 20 ms; a cancellation waits for no more."""

_MAX_VALUES = 2**25
"""Of one text, 128 MiB: a result that goes over the link in one message."""


class PoolingInputs:
    """Tokenizes texts and checks them and their parameters against the limits of the model."""

    def __init__(
        self, config: EngineConfig, model: ResolvedModel, tokenizer: Tokenizer, inputs: InputProcessor
    ) -> None:
        self._model = model
        self._pooler = model.pooler
        self._config = config.model.pooler
        self._inputs = inputs
        self._tokenizer = PoolingTokenizer(tokenizer, model.max_model_len)

    def fit_params(self, params: PoolingParams | None) -> PoolingParams:
        """`params` with its task, checked.

        Raises:
          InvalidRequestError: the model does not have the task, or cannot cut its embeddings so.
        """
        params = PoolingParams() if params is None else check_type("params", params, PoolingParams)
        if params.task is None:
            params = attrs.evolve(params, task=pooling_tasks(self._model)[0])
        assert params.task is not None
        check_task(self._model, params.task)
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions, params.task)
        return params

    def _check_dimensions(self, dimensions: int, task: str) -> None:
        pooler = self._pooler
        if task not in {"embed", "token_embed"}:
            allowed = f"not set for the task {task!r}"
        elif pooler is None or pooler.dimensions is None:
            allowed = "not set for this model, which was not trained to have its embeddings cut"
        elif not pooler.dimensions:
            allowed = f"an integer from 1 to {pooler.hidden_size}"
            if dimensions <= pooler.hidden_size:
                return
        else:
            allowed = f"one of {', '.join(map(str, pooler.dimensions))}"
            if dimensions in pooler.dimensions:
                return
        raise InvalidRequestError(f"dimensions must be {allowed}, got {dimensions}.", parameter="dimensions")

    def normalizes(self, params: PoolingParams) -> bool:
        """Embeddings get length 1."""
        if params.use_activation is not None:
            return params.use_activation
        return self._pooler is None or self._pooler.normalizes

    # Prompts

    def with_instruction(self, prompt: PromptType | PairPrompt, name: str | None) -> Prompt:
        """The prompt, after what the model wants before texts of the kind `name` (None: its default; "":
        nothing), in lower case if the model wants that. Pairs and token ids are left as they are.

        Raises:
          TypeError, InvalidRequestError: see `parse_prompt`; or the model has no such kind.
        """
        if isinstance(prompt, PairPrompt):
            return prompt
        parsed = parse_prompt(prompt)
        if isinstance(parsed, AudioPrompt):
            raise InvalidRequestError("This model takes text, and the prompt is audio.", parameter="prompt")
        instruction = self._instruction(name)
        if not isinstance(parsed, TextPrompt):
            return parsed
        text = instruction + parsed.text
        lowers = self._pooler is not None and self._pooler.lower_case
        return attrs.evolve(parsed, text=text.lower() if lowers else text)

    def _instruction(self, name: str | None) -> str:
        prompts = {} if self._pooler is None else self._pooler.prompts
        if name is None and self._pooler is not None:
            name = self._pooler.default_prompt
        if not name:
            return ""
        if name not in prompts:
            known = ", ".join(prompts) or "none"
            raise InvalidRequestError(
                f"prompt_name must be one of the model's prompts ({known}), got {shown(name)}.",
                parameter="prompt_name",
            )
        return prompts[name]

    def name_for(self, *kinds: str) -> str | None:
        """The first of these names that the model has an instruction for; None, for its default, if none."""
        prompts = {} if self._pooler is None else self._pooler.prompts
        return next((kind for kind in kinds if kind in prompts), None)

    async def tokenize(self, prompts: Sequence[Prompt], params: PoolingParams) -> list[Sequence[PoolingText]]:
        """For each prompt what the engine is given: one text, or its pieces, if it is too long and may be
        cut in pieces. Many texts are tokenized in a thread, a part of them at a time; few at once (no
        checkpoint).

        Raises:
          InvalidRequestError: a prompt is empty or too long, or has what no text or token is.
        """
        in_pieces = params.task == "embed" and self._config.enable_chunked_processing
        tokenized: list[Sequence[PoolingText]] = []
        fitted = []
        for index, prompt in enumerate(prompts):
            with _numbering(index, len(prompts)):
                fitted.append(self._fit(prompt, in_pieces=in_pieces))
        for part, num_characters in _parts(fitted):
            tokenize = partial(self._tokenizer.tokenize, in_pieces=in_pieces)
            tokenized += await self._inputs.in_thread_if_long(tokenize, part, num_characters=num_characters)
        for index, pieces in enumerate(tokenized):
            with _numbering(index, len(prompts)):
                self._check(pieces, params)
        return tokenized

    def _fit(self, prompt: Prompt, *, in_pieces: bool) -> Prompt:
        """Cheap checks, before anything is tokenized."""
        match prompt:
            case TokensPrompt():
                self._inputs.check_vocabulary(prompt.token_ids)
                return prompt
            case PairPrompt():
                return attrs.evolve(
                    prompt,
                    text=self._inputs.fit_text(prompt.text, prompt.truncation),
                    text_pair=self._inputs.fit_text(prompt.text_pair, prompt.truncation),
                )
            case _ if in_pieces and prompt.truncation is None:
                return prompt
            case _:
                return attrs.evolve(prompt, text=self._inputs.fit_text(prompt.text, prompt.truncation))

    def _check(self, pieces: Sequence[PoolingText], params: PoolingParams) -> None:
        length = sum(len(piece.token_ids) for piece in pieces)
        if not length:
            raise InvalidRequestError("The prompt is empty.", parameter="prompt")
        if len(pieces) == 1:
            if length > self._model.max_model_len:
                raise self._inputs.too_long(f"the prompt has {length} tokens")
            self._check_num_values(length, params)
            return
        limit = self._config.max_embed_len
        if limit is not None and length > limit:
            raise InvalidRequestError(
                f"A prompt must have at most {limit} tokens (max_embed_len), got {length}.",
                parameter="prompt",
            )

    def _check_num_values(self, length: int, params: PoolingParams) -> None:
        if self._pooler is None or params.task not in {"token_embed", "token_classify"}:
            return
        width = self._pooler.hidden_size if params.task == "token_embed" else len(self._pooler.labels)
        if length * width > _MAX_VALUES:
            raise InvalidRequestError(
                f"The results of a text for the task {params.task!r} must be at most {_MAX_VALUES} values, "
                f"got {length} tokens with {width} each.",
                parameter="prompt",
            )


@contextmanager
def _numbering(index: int, count: int) -> Iterator[None]:
    """Of several prompts, an error says which one it is about."""
    try:
        yield
    except InvalidRequestError as error:
        if error.parameter == "prompt" and count > 1:
            error.parameter = f"prompts[{index}]"
            error.args = (f"{error.parameter}: {error}",)
        raise


def _parts(prompts: Sequence[Prompt]) -> Iterator[tuple[Sequence[Prompt], int]]:
    """Neighbours that are tokenized together, and how many characters they have."""
    part: list[Prompt] = []
    num_characters = 0
    for prompt in prompts:
        part.append(prompt)
        num_characters += _num_characters(prompt)
        if num_characters >= _CHARACTERS_AT_ONCE:
            yield part, num_characters
            part, num_characters = [], 0
    if part:
        yield part, num_characters


def _num_characters(prompt: Prompt) -> int:
    match prompt:
        case TokensPrompt():
            return 0
        case PairPrompt():
            return len(prompt.text) + len(prompt.text_pair)
        case TextPrompt():
            return len(prompt.text)
