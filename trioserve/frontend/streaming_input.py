"""A request whose prompt comes in pieces, with an answer to each.

Each piece is appended to everything known so far (pieces, and what was generated between them), and then the
model goes on from there. To the engine every piece is a request of its own, with a longer prompt than the one
before, most of which the prefix cache has; between two of them it holds nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, AsyncIterable
from typing import TYPE_CHECKING

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.frontend.admission import Place
from trioserve.frontend.arguments import check_request_id, sampling_params_or_default
from trioserve.frontend.channel import OutputChannel
from trioserve.frontend.completion import Completion
from trioserve.frontend.input_processor import Routing
from trioserve.frontend.prompts import PromptType
from trioserve.frontend.requests import Requests, Round
from trioserve.outputs import FinishReason
from trioserve.sampling_params import RequestOutputKind, SamplingParams
from trioserve.validators import one_of_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.frontend.input_processor import TokenizedPrompt
    from trioserve.outputs import RequestOutput

__all__ = ["InputStream", "PromptStream", "StreamedRequest", "StreamingInput"]


@attrs.frozen
class StreamingInput:
    """One piece of a prompt."""

    prompt: PromptType
    """As of any request. Of text, only the first piece gets the tokenizer's special tokens (BOS)."""
    sampling_params: SamplingParams | None = attrs.field(default=None, validator=one_of_class(SamplingParams))
    """For the answer to this piece; None: those of the stream. `output_kind` is the stream's in any case."""


PromptStream = AsyncIterable[StreamingInput | PromptType]


@attrs.define(eq=False)
class StreamedRequest:
    """The consumer's end of such a request, in place of an OutputChannel.

    The pieces are fetched by the consumer's own task, in `take`, and only when the answer to the piece before
    has ended. No task runs for this, and nothing is buffered.
    """

    _requests: Requests
    _channel: OutputChannel
    _place: Place
    """Held to the end, also between two pieces: no piece can be refused for lack of room."""
    _pieces: InputStream
    _params: SamplingParams
    _routing: Routing
    _known: list[int] = attrs.field(factory=list, init=False)
    """Everything before the present answer: what the engine was given last."""
    _answer: list[int] = attrs.field(factory=list, init=False)
    """Tokens of the present answer, as far as they were read."""
    _awaits_input: bool = attrs.field(default=True, init=False)

    @classmethod
    def open(
        cls,
        requests: Requests,
        pieces: PromptStream,
        params: SamplingParams | None,
        routing: Routing,
        *,
        request_id: str | None,
    ) -> StreamedRequest:
        """Register the request; no piece is fetched yet.

        Raises:
          InvalidRequestError: `params` cannot go with streaming input.
          OverloadedError: there is no room for it.
        """
        routing.check()
        check_request_id(request_id)
        params = sampling_params_or_default(params)
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            raise _refusal("output_kind", "FINAL_ONLY")
        _check(params)
        stream = InputStream(pieces)  # which may fail, so before anybody knows the request
        channel = requests.open_channel(request_id, params)
        channel.expects_input = True
        place = requests.admission.reserve(1)
        requests.register(channel)
        return cls(requests, channel, place, stream, params, routing)

    @property
    def exhausted(self) -> bool:
        return self._channel.exhausted

    async def take(self) -> RequestOutput:
        """The next output, for which the next piece may have to be fetched first.

        Raises what `OutputChannel.take` raises; InvalidRequestError where a piece cannot be served; whatever
        fetching the piece raises. After any of these the request is over.
        """
        if self._awaits_input:
            await self._go_on()
        output = await self._channel.take()
        (completion,) = output.outputs
        if self._params.output_kind is RequestOutputKind.DELTA:
            self._answer += completion.token_ids
        elif completion.finished:
            self._answer = list(completion.token_ids)
        self._awaits_input = completion.finished
        return output

    def release(self) -> None:
        """End the request in the engine. Not a checkpoint; `aclose` comes next."""
        self._requests.release(self._channel)
        self._place.close()

    async def aclose(self) -> None:
        """End the pieces, if they come from an async generator."""
        await self._pieces.aclose()

    async def _go_on(self) -> None:
        try:
            await self._begin_next_round()
        except Exception:
            self.release()
            self._channel.exhausted = True
            raise

    async def _begin_next_round(self) -> None:
        self._channel.check()
        piece = await self._pieces.next()
        self._channel.check()
        if piece is None:
            self._end_input()
            return
        params = attrs.evolve(piece.sampling_params or self._params, output_kind=self._params.output_kind)
        _check(params)
        tokenized = await self._requests.inputs.tokenize_part(piece.prompt, is_first=not self._known)
        prompt = [*self._known, *self._answer, *tokenized.token_ids]
        self._requests.inputs.check_length(len(prompt))
        params = self._requests.inputs.fit_params(params, len(prompt))
        work = await self._make_round(prompt, params, tokenized)
        self._known, self._answer, self._awaits_input = prompt, [], False
        self._start(work)

    async def _make_round(
        self, prompt: Sequence[int], params: SamplingParams, piece: TokenizedPrompt
    ) -> Round:
        return Round(
            prompts=[array("i", prompt).tobytes()],
            params=params,
            routing=self._routing.for_prompt(piece),
            constraints=await self._requests.inputs.constraints(params),
        )

    def _start(self, work: Round) -> None:
        completion = Completion(0, work.params, self._requests.tokenizer, self._known)
        self._channel.begin(self._known, [completion])
        if self._channel.was_aborted:  # while it waited for the piece
            completion.finish(FinishReason.ABORT)
        else:
            self._requests.start(self._channel, work)

    def _end_input(self) -> None:
        if not self._known:
            raise InvalidRequestError("The stream of input has no piece.", parameter="prompt")
        self._channel.end_input()


def _check(params: SamplingParams) -> None:
    """What would not be clear, or not possible, with pieces."""
    if params.n > 1:
        raise _refusal("n", "more than 1")
    if params.stop:
        raise _refusal("stop", "a stop string")
    if params.prompt_logprobs is not None:
        raise _refusal("prompt_logprobs", str(params.prompt_logprobs))


def _refusal(field: str, value: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} cannot be {value} with streaming input.", parameter=field)


class InputStream:
    """The pieces, one after the other.

    An async generator is begun here and is therefore closed here; anything else that can be iterated (the
    receiving end of a memory channel, say) stays its owner's.
    """

    def __init__(self, pieces: PromptStream) -> None:
        self._pieces = aiter(pieces)

    async def next(self) -> StreamingInput | None:
        """None at the end."""
        try:
            piece = await anext(self._pieces)
        except StopAsyncIteration:
            return None
        return piece if isinstance(piece, StreamingInput) else StreamingInput(piece)

    async def aclose(self) -> None:
        if isinstance(self._pieces, AsyncGenerator):
            await self._pieces.aclose()
