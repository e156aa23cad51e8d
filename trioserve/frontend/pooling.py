"""Requests to an engine that pools: many texts, one scope, one result each."""

from __future__ import annotations

import math
import operator
from array import array
from itertools import chain
from typing import TYPE_CHECKING

from trioserve.frontend.arguments import check_request_id
from trioserve.frontend.input_processor import Routing
from trioserve.frontend.pooled_completion import PooledCompletion, no_result
from trioserve.link.messages import AddPooling
from trioserve.outputs import FinishReason, PoolingOutput, PoolingRequestOutput
from trioserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.frontend.channel import OutputChannel
    from trioserve.frontend.pooling_inputs import PoolingInputs
    from trioserve.frontend.pooling_tokenizer import PoolingText, Prompt
    from trioserve.frontend.requests import Requests
    from trioserve.frontend.tokenizer import Tokenizer
    from trioserve.pooling_params import PoolingParams

__all__ = ["PoolingRequests"]

_FINAL_ONLY = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)


class PoolingRequests:
    """Over the `Requests` of an AsyncLLM, which know the channel of each and end it."""

    def __init__(self, inputs: PoolingInputs, requests: Requests, tokenizer: Tokenizer) -> None:
        self.inputs = inputs
        self._requests = requests
        self._tokenizer = tokenizer

    async def encode(
        self, prompts: Sequence[Prompt], params: PoolingParams, *, request_id: str | None, priority: int
    ) -> list[PoolingRequestOutput]:
        """The results, in the order of the prompts; see `AsyncLLM.encode_many`. `params` have been fitted."""
        routing = Routing(priority=priority)
        routing.check()
        check_request_id(request_id)
        if not prompts:
            return []
        with self._requests.admission.reserve(len(prompts), parameter="prompts") as place:
            tokenized = await self.inputs.tokenize(prompts, params)
            texts = list(chain.from_iterable(tokenized))
            self._requests.admission.check_tokens(sum(len(text.token_ids) for text in texts))
            channel = self._requests.open_channel(request_id, _FINAL_ONLY)
            completions = [
                PooledCompletion(index, self._tokenizer, text.token_ids) for index, text in enumerate(texts)
            ]
            channel.completions = completions
            channel.place = place.hand_over()
            self._requests.start_pooling(channel, [_to_add(text, params, routing) for text in texts], params)
        try:
            pooled = await _wait(channel, completions)
        finally:
            self._requests.release(channel)
        return self._outputs(channel.request_id, tokenized, pooled, params)

    def _outputs(
        self,
        request_id: str,
        tokenized: Sequence[Sequence[PoolingText]],
        pooled: Sequence[PoolingOutput],
        params: PoolingParams,
    ) -> list[PoolingRequestOutput]:
        results = iter(pooled)
        outputs = []
        for index, pieces in enumerate(tokenized):
            own = [next(results) for _ in pieces]
            token_ids = pieces[0].token_ids
            if len(pieces) > 1:
                token_ids = list(chain.from_iterable(piece.token_ids for piece in pieces))
                lengths = [len(piece.token_ids) for piece in pieces]
                own = [_average(own, lengths, normalizes=self.inputs.normalizes(params))]
            outputs.append(
                PoolingRequestOutput(
                    request_id=request_id if len(tokenized) == 1 else f"{request_id}-{index}",
                    outputs=own[0],
                    prompt_token_ids=token_ids,
                )
            )
        return outputs


def _to_add(text: PoolingText, params: PoolingParams, routing: Routing) -> AddPooling:
    return AddPooling(
        request_id=0,  # filled in when it is sent, as is the time that is left
        prompt_token_ids=array("i", text.token_ids).tobytes(),
        token_type_ids=text.type_ids,
        params=params,
        time_left=None,
        priority=routing.priority,
    )


async def _wait(channel: OutputChannel, completions: Sequence[PooledCompletion]) -> list[PoolingOutput]:
    """Until all texts have ended, or the first one without a result.

    Raises:
      EngineGenerateError: that one failed, or was aborted by its name.
      EngineDeadError, InvalidRequestError: what the engine says to all of them.
    """
    await channel.wait()
    channel.check()
    pooled = []
    for completion in completions:
        if completion.pooled is None:
            raise no_result(completion.finish_reason or FinishReason.ERROR)
        pooled.append(completion.pooled)
    return pooled


def _average(pieces: Sequence[PoolingOutput], lengths: Sequence[int], *, normalizes: bool) -> PoolingOutput:
    """Of a text's pieces, each with the weight of its tokens; of length 1, if pieces are."""
    total = [0.0] * pieces[0].num_values
    for piece, length in zip(pieces, lengths, strict=True):
        weight = length / sum(lengths)
        total = list(map(operator.add, total, (weight * value for value in piece.data)))
    if normalizes:
        norm = math.sqrt(sum(value * value for value in total))
        total = [value / (norm or 1.0) for value in total]
    return PoolingOutput(array("f", total))
