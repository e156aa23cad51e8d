"""A beam search as a request: one round of one-token sequences after the other on the engine."""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING

import attrs

from trioserve.beam_search_params import BeamSearchParams
from trioserve.errors import EngineGenerateError, InvalidRequestError
from trioserve.frontend.arguments import check_request_id, check_type
from trioserve.frontend.beam_search import BeamSearch
from trioserve.frontend.channel import OutputChannel
from trioserve.frontend.completion import Completion
from trioserve.frontend.detokenizer import Detokenizer
from trioserve.frontend.input_processor import Routing
from trioserve.frontend.logprobs import named_logprobs
from trioserve.frontend.requests import Requests, Round
from trioserve.outputs import BeamSearchOutput, BeamSearchSequence, FinishReason
from trioserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.frontend.beam_search import Beam
    from trioserve.frontend.input_processor import InputProcessor, TokenizedPrompt
    from trioserve.frontend.prompts import PromptType
    from trioserve.frontend.tokenizer import Tokenizer

__all__ = ["run_beam_search"]


async def run_beam_search(
    requests: Requests,
    prompt: PromptType,
    params: BeamSearchParams,
    routing: Routing,
    *,
    request_id: str | None,
    eos_token_ids: Sequence[int],
) -> BeamSearchOutput:
    """See `AsyncLLM.beam_search`.

    All beams are sequences of one channel: one name to abort, one thing to release. They share what they have
    in common in the engine's prefix cache, so a step costs it little more than one token per beam.
    """
    _check(check_type("params", params, BeamSearchParams), requests.inputs)
    routing.check()
    check_request_id(request_id)
    with requests.admission.reserve(params.beam_width, parameter="beam_width"):  # for all its rounds
        return await _search(
            requests, prompt, params, routing, request_id=request_id, eos_token_ids=eos_token_ids
        )


async def _search(
    requests: Requests,
    prompt: PromptType,
    params: BeamSearchParams,
    routing: Routing,
    *,
    request_id: str | None,
    eos_token_ids: Sequence[int],
) -> BeamSearchOutput:
    tokenized = await requests.inputs.tokenize(prompt)
    if tokenized.audio is not None:
        raise InvalidRequestError("Beam search takes text, and the prompt is audio.", parameter="prompt")
    requests.inputs.check_room(params.max_tokens, len(tokenized.token_ids))
    requests.admission.check_tokens(len(tokenized.token_ids))
    search = BeamSearch(tokenized.token_ids, params, eos_token_ids)
    one_token = _one_token(params, requests.inputs.vocab_size)
    channel = requests.open_channel(request_id, one_token)
    channel.is_counted = False
    channel.prompt_token_ids = tokenized.token_ids
    requests.register(channel)
    requests.log(channel.request_id, len(tokenized.token_ids), params)
    started = time.monotonic()
    reason = FinishReason.ABORT
    try:
        runner = _Runner(requests, channel, one_token, routing.for_prompt(tokenized))
        await runner.run(search)
        reason = search.finished[0].finish_reason or reason
    except Exception:
        reason = FinishReason.ERROR
        raise
    finally:
        requests.release(channel)
        num_tokens = max((beam.length for beam in search.finished), default=0)
        requests.count_end(reason, len(tokenized.token_ids), num_tokens, time.monotonic() - started)
    return BeamSearchOutput(
        request_id=channel.request_id,
        prompt=tokenized.text,
        prompt_token_ids=tokenized.token_ids,
        sequences=[_show(beam, tokenized, requests.tokenizer, params) for beam in search.finished],
    )


def _check(params: BeamSearchParams, inputs: InputProcessor) -> None:
    if params.structured_outputs is not None:
        raise InvalidRequestError(
            "structured_outputs must not be set for a beam search: it ranks tokens by what the model says "
            "of them, before any grammar acts.",
            parameter="structured_outputs",
        )
    if _needs_all_logprobs(params) and not inputs.allows_all_logprobs:
        raise InvalidRequestError(
            f"temperature must be 0 or 1 for a beam search, got {params.temperature}: another one needs the "
            "logprobs of the whole vocabulary after each token, which this engine's max_logprobs does not "
            "allow (-1 would).",
            parameter="temperature",
        )


def _needs_all_logprobs(params: BeamSearchParams) -> bool:
    """Logits divided by a temperature have another sum, which only all of them together tell."""
    return params.temperature not in {0.0, 1.0}


def _one_token(params: BeamSearchParams, vocab_size: int) -> SamplingParams:
    """What a beam asks of the engine. An engine's max_logprobs is no limit here: it bounds what clients may
    have sent to them, and the beam width bounds this."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        logprobs=-1 if _needs_all_logprobs(params) else min(2 * params.beam_width, vocab_size),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


@attrs.frozen(eq=False)
class _Runner:
    _requests: Requests
    _channel: OutputChannel
    _params: SamplingParams
    _routing: Routing

    async def run(self, search: BeamSearch) -> None:
        """Until the search is done, or the request is aborted or out of time: then with what there is."""
        while not search.is_done:
            if self._channel.was_aborted:
                search.end(FinishReason.ABORT)
                return
            completions = await self._run_round(search.live)
            reasons = {completion.finish_reason for completion in completions}
            if FinishReason.ERROR in reasons:
                raise EngineGenerateError("A step of the beam search failed inside the engine.")
            for reason in (FinishReason.ABORT, FinishReason.DEADLINE):
                if reason in reasons:
                    search.end(reason)
                    return
            search.advance([completion.logprob_rows[0] for completion in completions])

    async def _run_round(self, beams: Sequence[Beam]) -> Sequence[Completion]:
        channel = self._channel
        channel.begin(
            channel.prompt_token_ids,
            [Completion(index, self._params, self._requests.tokenizer, ()) for index in range(len(beams))],
        )
        prompts = [beam.token_ids for beam in beams]
        self._requests.start(channel, Round(prompts=prompts, params=self._params, routing=self._routing))
        await channel.wait()
        channel.check()
        return channel.completions


def _show(
    beam: Beam, prompt: TokenizedPrompt, tokenizer: Tokenizer, params: BeamSearchParams
) -> BeamSearchSequence:
    tokens = array("i", beam.token_ids).tolist()
    if beam.stop_token_id is not None and not params.include_stop_str_in_output:
        tokens.pop()
    output_token_ids = tokens[len(prompt.token_ids) :]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True, context=prompt.token_ids)
    pieces = [detokenizer.push(token_id) for token_id in output_token_ids]
    assert beam.finish_reason is not None
    return BeamSearchSequence(
        tokens=tokens,
        output_token_ids=output_token_ids,
        text=tokenizer.decode(tokens),
        output_text="".join(pieces) + detokenizer.flush(),
        logprobs=named_logprobs(beam.logprob_rows(), tokenizer),
        cum_logprob=beam.cum_logprob,
        score=beam.score,
        finish_reason=beam.finish_reason,
        stop_reason=beam.stop_token_id,
    )
