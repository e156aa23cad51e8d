"""One answer, however it is asked for: streamed, in one piece, and offline.

A hundred prompts to a server and to an `LLM` with the same settings.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import httpx2
import pytest
import trio

from served import MODEL, STEADY
from trioserve import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from served import ServedModel
    from trioserve import CompletionOutput

MAX_TOKENS = 14
LOGPROB_TOLERANCE = 1e-3
"""The size of a batch changes the last bits."""

_TEXTS = [
    "The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):\n",
    "Emoji, one after the other: 🙂🙃😀🙂🙃", "Дорогие друзья, сегодня мы", "東京は日本の",
    "Le café était fermé, à côté",
    "مرحبا بكم في", "αβγδεζηθ, αβγδεζηθ, αβγδ", "👩‍👩‍👧 family, 👨‍👩‍👦 family, 👩",
    "Q: What is 12 times 12?\nA:",
    "naïve, coöperate, façade, São", "Ünïcödé tèxt: Ünïcödé", "한국어로 말하면", "1, 2, 3, 4, 5, 6,",
    "<html>\n<head>\n<title>", "The three primary colours are", "שלום לכולם, ", "z̴a̴l̴g̴o̴ z̴a̴l̴",
    "Water boils at",
]  # fmt: skip

_VARIATIONS: list[dict[str, Any]] = [
    {"temperature": 0, "stop": [".", ",", "\n\n", "、"]},
    {"temperature": 0, "stop": [" and", "s the", "é"], "include_stop_str_in_output": True},
    {"temperature": 1.0, "seed": 7, "top_p": 0.9, "top_k": 20, "stop": ["e t", ", "]},
    {"temperature": 1.5, "seed": 2**40, "top_k": 10, "repetition_penalty": 1.1},
]
"""Of completions; a chat of each text is the fifth. The draws are among few tokens: of hundreds, some have
shares so narrow that the last bits of the logits decide."""

_CHAT: dict[str, Any] = {"temperature": 0, "stop": ["the ", "!", " a"]}


@attrs.frozen
class Case:
    text: str
    params: dict[str, Any]
    is_chat: bool

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]

    @property
    def body(self) -> dict[str, Any]:
        body = {"model": MODEL, "max_tokens": MAX_TOKENS, "return_token_ids": True, **self.params}
        if self.is_chat:
            return {**body, "messages": self.messages, "logprobs": True, "top_logprobs": 2}
        # By id, as two tokens that are parts of characters may have one spelling.
        return {**body, "prompt": self.text, "logprobs": 2, "return_tokens_as_token_ids": True}

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def sampling_params(self) -> SamplingParams:
        return SamplingParams(max_tokens=MAX_TOKENS, logprobs=2, **self.params)


CASES = [
    *(Case(text, params, is_chat=False) for params in _VARIATIONS for text in _TEXTS),
    *(Case(text, _CHAT, is_chat=True) for text in _TEXTS),
]


@attrs.define
class Answer:
    text: str = ""
    token_ids: list[int] = attrs.field(factory=list)
    prompt_token_ids: list[int] = attrs.field(factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: list[float] = attrs.field(factory=list, eq=False)
    top_logprobs: list[list[float]] = attrs.field(factory=list, eq=False)
    """Of each token, in falling order."""

    def check_logprobs(self, other: Answer) -> None:
        assert len(self.logprobs) == len(self.top_logprobs) == len(self.token_ids)
        assert self.logprobs == pytest.approx(other.logprobs, abs=LOGPROB_TOLERANCE)
        for mine, others in zip(self.top_logprobs, other.top_logprobs, strict=True):
            assert mine == pytest.approx(others, abs=LOGPROB_TOLERANCE)

    def add(self, choice: Any, piece: Any) -> None:
        """A choice of an answer or a chunk; `piece` has the text of a chat."""
        self.text += (choice["text"] if "text" in choice else piece.get("content")) or ""
        self.token_ids += choice.get("token_ids") or []
        self.finish_reason = choice["finish_reason"]
        self.stop_reason = choice.get("stop_reason")
        found = choice["logprobs"] or {}
        self.logprobs += found.get("token_logprobs") or [
            token["logprob"] for token in found.get("content", ())
        ]
        tops = [list(top.values()) for top in found.get("top_logprobs", ())]
        tops += [[top["logprob"] for top in token["top_logprobs"]] for token in found.get("content", ())]
        self.top_logprobs += [sorted(top, reverse=True)[:2] for top in tops]


async def in_one_piece(client: httpx2.AsyncClient, case: Case) -> Answer:
    response = await client.post(case.path, json=case.body)
    assert response.status_code == 200, response.text
    reply = response.json()
    (choice,) = reply["choices"]
    answer = Answer()
    answer.add(choice, choice.get("message"))
    answer.prompt_token_ids = choice.get("prompt_token_ids") or reply["prompt_token_ids"]
    return answer


async def streamed(client: httpx2.AsyncClient, case: Case) -> Answer:
    answer = Answer()
    async with client.stream("POST", case.path, json={**case.body, "stream": True}) as response:
        assert response.status_code == 200
        events = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert events.pop() == "[DONE]"
    for chunk in map(json.loads, events):
        (choice,) = chunk["choices"]
        assert answer.finish_reason is None, "something after the end"
        answer.add(choice, choice.get("delta"))
        told = choice.get("prompt_token_ids") or chunk.get("prompt_token_ids")
        answer.prompt_token_ids = answer.prompt_token_ids or told
    return answer


def offline() -> list[Answer]:
    with LLM(model=MODEL, dtype=STEADY, threads=1) as llm:
        chats = [case for case in CASES if case.is_chat]
        others = [case for case in CASES if not case.is_chat]
        params = [case.sampling_params for case in others]
        outputs = llm.generate([case.text for case in others], params, use_tqdm=False)
        conversations = [case.messages for case in chats]
        outputs += llm.chat(conversations, [case.sampling_params for case in chats], use_tqdm=False)
    return [_offline_answer(output.outputs[0], output.prompt_token_ids) for output in outputs]


def _offline_answer(completion: CompletionOutput, prompt_token_ids: Sequence[int]) -> Answer:
    rows = completion.logprobs
    assert rows is not None
    return Answer(
        text=completion.text,
        token_ids=list(completion.token_ids),
        prompt_token_ids=list(prompt_token_ids),
        finish_reason=str(completion.finish_reason),
        stop_reason=completion.stop_reason,
        logprobs=[row[token].logprob for token, row in zip(completion.token_ids, rows, strict=True)],
        top_logprobs=[sorted((entry.logprob for entry in row.values()), reverse=True)[:2] for row in rows],
    )


async def ask_all(server: ServedModel, how: Any) -> list[Answer]:
    answers = [Answer() for _ in CASES]

    async def ask(index: int) -> None:
        answers[index] = await how(client, CASES[index])

    limits = httpx2.Limits(max_connections=None)
    async with (
        httpx2.AsyncClient(base_url=server.url, timeout=None, limits=limits) as client,
        trio.open_nursery() as nursery,
    ):
        for index in range(len(CASES)):
            nursery.start_soon(ask, index)
    return answers


async def test_streamed_is_in_one_piece_is_offline(server: ServedModel) -> None:
    whole = await ask_all(server, in_one_piece)
    in_pieces = await ask_all(server, streamed)
    alone = await trio.to_thread.run_sync(offline)
    for case, one, other, third in zip(CASES, whole, in_pieces, alone, strict=True):
        assert other == one, case
        assert third == one, case
        other.check_logprobs(one)
        third.check_logprobs(one)
    # Or else there was little to see.
    assert sum(isinstance(answer.stop_reason, str) for answer in whole) >= 20
    assert sum(answer.finish_reason == "length" for answer in whole) >= 20
    assert sum(not answer.text.isascii() for answer in whole) >= 20
    assert len(CASES) == 100
