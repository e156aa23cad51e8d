"""For the API's tests: a scripted engine, and a client that speaks ASGI.

Every reply is checked against what is said of it: see `response_checks`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trioserve.args import EngineArgs
from trioserve.beam_search_params import BeamSearchParams
from trioserve.config import GenerationDefaults, ResolvedModel
from trioserve.errors import InvalidRequestError, OverloadedError, PromptTooLongError
from trioserve.frontend.prompts import TextPrompt, TokensPrompt
from trioserve.observability.metrics import EngineMetrics
from trioserve.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    TokenLogprobs,
)
from trioserve.sampling_params import RequestOutputKind, SamplingParams
from trioserve.server.app import create_app
from trioserve.server.request_stream import SEND_NOW

if TYPE_CHECKING:
    from trioserve.lora_request import LoRARequest
    from trioserve.server.request_stream import Unsent
    from trioserve.server_args import ServerArgs
    from trioserve.tasks import Task

# The engine

VOCABULARY = [
    b"Hello",
    b",",
    b" world",
    b"!",
    b" How",
    b" are",
    b" you",
    b"?",
    b"caf",
    b"\xc3",
    b"\xa9",
    b"<eos>",
]
"""Token id -> its bytes; 9 and 10 together are one character."""
EOS = 11


class FakeTokenizer:
    def __init__(self) -> None:
        self.added_tokens: dict[str, int] = {}
        self.special_tokens: frozenset[str] = frozenset()
        self.chat_template: str | None = None

    def token_bytes(self, token_id: int) -> bytes:
        return VOCABULARY[token_id]

    def token_text(self, token_id: int) -> str:
        return VOCABULARY[token_id].decode(errors="replace")

    def spelling(self, token_id: int) -> str:
        return VOCABULARY[token_id].decode("latin-1")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """As a `Call` counts them."""
        return [7] * len(text.split())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(VOCABULARY[token_id] for token_id in token_ids).decode(errors="replace")


@attrs.frozen
class Call:
    """One request as it reached the engine."""

    prompt: Any
    params: SamplingParams
    request_id: str
    cache_salt: str | None
    priority: int

    @property
    def text(self) -> str | None:
        if isinstance(self.prompt, TextPrompt | TokensPrompt):
            return getattr(self.prompt, "text", None)
        return self.prompt if isinstance(self.prompt, str) else None

    @property
    def token_ids(self) -> list[int]:
        """One per word of a text."""
        if self.text is not None:
            return [7] * len(self.text.split())
        return list(self.prompt)


@attrs.frozen(kw_only=True)
class Answer:
    """What a completion is to be."""

    token_ids: tuple[int, ...] = (0, 1, 2)
    reason: FinishReason = FinishReason.STOP
    stop_reason: int | str | None = None
    error: Exception | None = None
    """Raised after the last token."""
    alternatives: tuple[tuple[int, float, int], ...] = ()
    """(token, logprob, rank) of every position, beside the sampled one."""
    logprob: float = -0.5
    """Of every token."""
    sampled_rank: int = 1
    hidden: tuple[int, ...] = ()
    """Positions whose text the detokenizer holds back; it comes with the next one."""


Script = Callable[[Call, int], Answer]
"""(request, completion index) -> its answer."""


class _FakeChannel:
    """What `OutputChannel` is to the server."""

    def __init__(self, llm: FakeLLM, call: Call) -> None:
        self.call = call
        self.watcher: Callable[[], None] | None = None
        self._llm = llm
        self._outputs = list(llm.play(call))

    @property
    def has_news(self) -> bool:
        return bool(self._outputs) and self._llm.outputs_left != 0

    async def take(self) -> RequestOutput:
        await trio.lowlevel.checkpoint()
        if not self.has_news:
            await trio.sleep_forever()
        return self.take_nowait()

    async def forward(self, deliver: Callable[[RequestOutput], bool]) -> None:
        """All that will come is there already."""

    def take_nowait(self) -> RequestOutput:
        if self._llm.outputs_left is not None:
            self._llm.outputs_left -= 1
        output = self._outputs.pop(0)
        if isinstance(output, Exception):
            raise output
        if self.has_news and self.watcher is not None:
            self.watcher()
        return output


@attrs.frozen
class Search:
    """A beam search as it reached the engine."""

    prompt: Any
    params: BeamSearchParams
    options: dict[str, Any]


class FakeLLM:
    """`AsyncLLM` as the server sees it: every output comes from the script, one token of each completion at
    a time."""

    def __init__(
        self,
        script: Script | Answer | None = None,
        *,
        generation: GenerationDefaults | None = None,
        names: tuple[str, ...] = ("small", "also-small"),
        tasks: tuple[Task, ...] = ("generate",),
    ) -> None:
        answer = script or Answer()
        self.script: Script = answer if not isinstance(answer, Answer) else lambda _call, _index: answer
        self.config = EngineArgs(model=f"models/{names[0]}", served_model_name=names).create_engine_config()
        self.model = ResolvedModel(
            directory="/models/small",
            tokenizer_directory="/models/small",
            architecture="LlamaForCausalLM",
            dtype="float32",
            vocab_size=len(VOCABULARY),
            context_length=64,
            max_model_len=64,
            eos_token_ids=(EOS,),
            generation=generation or GenerationDefaults(),
            tasks=tasks,
        )
        self.metrics = EngineMetrics(names[0], 64)
        self.tokenizer = FakeTokenizer()
        self.errored = False
        self.calls: list[Call] = []
        self.searches: list[Search] = []
        self.rendered: list[dict[str, Any]] = []
        self.running: set[str] = set()
        """Ids of the requests whose scope is open."""
        self.health: Callable[[], Any] | None = None
        self.no_room: OverloadedError | None = None
        """The engine's queue is full."""
        self.loras: set[str] = set()
        self.room: float = math.inf
        """So many sequences are let in."""
        self.outputs_left: int | None = None
        """None: no limit. After so many outputs the engine falls silent."""

    async def submit(
        self, prompt: Any, params: SamplingParams, *, request_id: str, cache_salt: str | None = None,
        priority: int = 0, lora_request: LoRARequest | None = None,
    ) -> _FakeChannel:  # fmt: skip
        await trio.lowlevel.checkpoint()
        call = Call(prompt, params, request_id, cache_salt, priority)
        if not call.token_ids:
            raise InvalidRequestError("The prompt is empty.", parameter="prompt")
        if len(call.token_ids) >= self.model.max_model_len:
            raise PromptTooLongError("The prompt is too long.")
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is not None and not wanted <= self.config.max_logprobs:
                raise InvalidRequestError(f"{name} must be at most 20, got {wanted}.", parameter=name)
        self.calls.append(call)
        self.running.add(request_id)
        return _FakeChannel(self, call)

    def release(self, channel: _FakeChannel) -> None:
        self.running.remove(channel.call.request_id)

    async def beam_search(self, prompt: Any, params: BeamSearchParams, **options: Any) -> BeamSearchOutput:
        """The script's answers to the indices below the beam's width, the best first."""
        await trio.lowlevel.checkpoint()
        self.searches.append(Search(prompt, params, options))
        call = Call(prompt, SamplingParams(), options["request_id"], None, 0)
        return BeamSearchOutput(
            request_id=call.request_id,
            prompt=call.text,
            prompt_token_ids=call.token_ids,
            sequences=[_found(call, self.script(call, index)) for index in range(params.beam_width)],
        )

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> TextPrompt:
        await trio.lowlevel.checkpoint()
        self.rendered.append({"messages": messages, **options})
        text = " ".join(f"{message['role']}: {message['content']}" for message in messages)
        return TextPrompt(text, add_special_tokens=False)

    def has_lora(self, name: str | None) -> bool:
        return name in self.loras

    async def list_loras(self) -> list[Any]:
        await trio.lowlevel.checkpoint()
        return []

    def check_room(self, num_sequences: int = 1) -> None:
        if self.no_room is not None:
            raise self.no_room
        if num_sequences > self.room:
            raise OverloadedError("Too many wait.")

    async def check_health(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.health is not None:
            await self.health()

    def play(self, call: Call) -> list[RequestOutput | Exception]:
        answers = [self.script(call, index) for index in range(call.params.n)]
        steps = max(len(answer.token_ids) for answer in answers)
        error = next((answer.error for answer in answers if answer.error is not None), None)
        known = _prompt_logprobs(call, answers[0])
        pieces = [_pieces(call, index, answer) for index, answer in enumerate(answers)]
        if call.params.output_kind is RequestOutputKind.FINAL_ONLY:
            joined = [_join(piece) for piece in pieces if piece]
            return [error or _output(call, joined, finished=True, prompt_logprobs=known)]
        outputs: list[RequestOutput | Exception] = [
            _output(
                call,
                [piece[step] for piece in pieces if step < len(piece)],
                finished=step == steps - 1 and error is None,
                prompt_logprobs=known if step == 0 else None,
            )
            for step in range(steps)
        ]
        return [*outputs, error] if error is not None else outputs


def _found(call: Call, answer: Answer) -> BeamSearchSequence:
    """An EOS that ended it has logprobs, and is no part of the output."""
    text = b"".join(VOCABULARY[token_id] for token_id in answer.token_ids).decode()
    return BeamSearchSequence(
        tokens=[*call.token_ids, *answer.token_ids],
        output_token_ids=answer.token_ids,
        text=f"{call.text}{text}",
        output_text=text,
        logprobs=[_logprobs(token_id, answer) for token_id in (*answer.token_ids, EOS)],
        cum_logprob=-1.0,
        score=-1.0,
        finish_reason=answer.reason,
        stop_reason=answer.stop_reason,
    )


def _pieces(call: Call, index: int, answer: Answer) -> list[CompletionOutput]:
    """A completion as deltas of one token."""
    pieces = []
    text = b""
    for position, token_id in enumerate(answer.token_ids):
        last = position == len(answer.token_ids) - 1
        text += VOCABULARY[token_id]
        held_back = not last and (position in answer.hidden or text.endswith(b"\xc3"))
        pieces.append(
            CompletionOutput(
                index=index,
                text="" if held_back else text.decode(),
                token_ids=[token_id],
                logprobs=None if call.params.logprobs is None else [_logprobs(token_id, answer)],
                finish_reason=answer.reason if last and answer.error is None else None,
                stop_reason=answer.stop_reason if last else None,
            )
        )
        text = text if held_back else b""
    return pieces


def _logprobs(token_id: int, answer: Answer) -> dict[int, Logprob]:
    tokenizer = FakeTokenizer()
    entries = [(token_id, answer.logprob, answer.sampled_rank), *answer.alternatives]
    found: dict[int, Logprob] = {}
    for entry_id, logprob, rank in entries:
        found.setdefault(entry_id, Logprob(logprob, rank, tokenizer.token_text(entry_id)))
    return found


def _join(pieces: list[CompletionOutput]) -> CompletionOutput:
    last = pieces[-1]
    return CompletionOutput(
        index=last.index,
        text="".join(piece.text for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        logprobs=None if last.logprobs is None else [row for piece in pieces for row in piece.logprobs or ()],
        cumulative_logprob=_cumulative_logprob(pieces),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


def _cumulative_logprob(pieces: list[CompletionOutput]) -> float | None:
    rows = [row for piece in pieces for row in piece.logprobs or ()]
    return sum(next(iter(row.values())).logprob for row in rows) if rows else None


def _prompt_logprobs(call: Call, answer: Answer) -> list[TokenLogprobs | None] | None:
    if call.params.prompt_logprobs is None:
        return None
    return [None, *(_logprobs(token_id, answer) for token_id in call.token_ids[1:])]


def _output(
    call: Call,
    completions: list[CompletionOutput],
    *,
    finished: bool,
    prompt_logprobs: list[TokenLogprobs | None] | None = None,
) -> RequestOutput:
    return RequestOutput(
        request_id=call.request_id,
        prompt=call.text,
        prompt_token_ids=call.token_ids,
        prompt_logprobs=prompt_logprobs,
        outputs=completions,
        finished=finished,
        num_cached_tokens=1,
    )


# The client


@attrs.define
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Of a stream: the decoded events, and the string "[DONE]"."""
        frames = self.body.decode().split("\n\n")
        assert frames.pop() == ""
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
        texts = [frame.removeprefix("data: ") for frame in frames]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


class Client:
    """Calls an application of `create_app` without a network."""

    def __init__(self, llm: FakeLLM | Sequence[FakeLLM], server_args: ServerArgs | None = None) -> None:
        self.app = create_app(llm, server_args)  # type: ignore[arg-type]  # the fake stands for an AsyncLLM

    async def post(self, path: str, content: Any = None, **headers: str) -> Reply:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return await self.call("POST", path, body, {"content-type": "application/json"} | _dashed(headers))

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.call("GET", path, b"", _dashed(headers))

    async def call(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        exchange = Exchange(self.app, method, path, body, headers)
        await exchange.run()
        return exchange.reply


def _dashed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-").lower(): value for name, value in headers.items()}


class Exchange:
    """One request and its response; `leave` is the client's going away. Streams are forwarded, as by our own
    server in clear text.

    A body that is None never comes. `peer` is the client's address.
    """

    def __init__(
        self,
        app: Any,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        *,
        peer: tuple[str, int] | None = ("127.0.0.1", 1),
        query: bytes = b"",
    ) -> None:
        self._app = app
        self._messages: list[dict[str, Any]] = []
        if body is not None:
            self._messages.append({"type": "http.request", "body": body, "more_body": False})
        self._gone = trio.Event()
        self._sent: list[dict[str, Any]] = []
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.1"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "root_path": "",
            "headers": [
                (b"host", b"testserver"),
                (b"content-length", b"%d" % len(body or b"later")),
                *((name.encode(), value.encode("latin-1")) for name, value in headers.items()),
            ],
            "client": peer,
            "server": ("127.0.0.1", 8000),
            "extensions": {SEND_NOW: {"send_now": self._send_now}},
        }

    async def run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    def leave(self) -> None:
        self._gone.set()

    @property
    def reply(self) -> Reply:
        start, *parts = self._sent
        assert start["type"] == "http.response.start"
        headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return Reply(start["status"], headers, b"".join(part["body"] for part in parts))

    @property
    def num_parts(self) -> int:
        """So many messages had a part of the response's body."""
        return sum(bool(message.get("body")) for message in self._sent)

    @property
    def received(self) -> bytes:
        """What has come of the response's body."""
        return b"".join(message.get("body", b"") for message in self._sent)

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        self._sent.append(message)

    def _send_now(self, part: bytes) -> Unsent | None:
        self._sent.append({"type": "http.response.body", "body": part, "more_body": True})
        return None
