"""`suffix` of completions: models with tokens for a gap are told of it, others refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from helpers_api import Client, FakeLLM
from served import ServedModel, served
from trioserve.frontend.prompts import TextPrompt

if TYPE_CHECKING:
    from collections.abc import Iterator

PATH = "/v1/completions"
QWEN = {"<|fim_prefix|>": 5, "<|fim_middle|>": 6, "<|fim_suffix|>": 7, "<|fim_pad|>": 8, "<|im_end|>": 9}


def knowing(added_tokens: dict[str, int]) -> FakeLLM:
    llm = FakeLLM()
    llm.tokenizer.added_tokens = added_tokens
    return llm


@pytest.mark.parametrize(
    ("added_tokens", "text", "ends"),
    [
        (QWEN, "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>", (5, 7, 6, 8)),
        (
            {"<fim_prefix>": 1, "<fim_middle>": 2, "<fim_suffix>": 3, "<|endoftext|>": 0},
            "<fim_prefix>A<fim_suffix>B<fim_middle>",
            (1, 3, 2, 0),
        ),
        ({"▁<PRE>": 1, "▁<MID>": 2, "▁<SUF>": 3}, "▁<PRE>A▁<SUF>B▁<MID>", (1, 3, 2)),
        (
            {"<｜fim▁begin｜>": 1, "<｜fim▁hole｜>": 2, "<｜fim▁end｜>": 3},  # noqa: RUF001 - their own spelling
            "<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>",  # noqa: RUF001
            (1, 2, 3),
        ),
    ],
)
async def test_the_gap_is_told_in_the_models_own_tokens(
    added_tokens: dict[str, int], text: str, ends: tuple[int, ...]
) -> None:
    llm = knowing(added_tokens)
    reply = await Client(llm).post(PATH, {"prompt": "A", "suffix": "B", "stop_token_ids": [11]})
    assert reply.json["choices"][0]["text"] == "Hello, world"
    (call,) = llm.calls
    assert call.prompt == TextPrompt(text)
    assert call.params.stop_token_ids == (11, *ends)


async def test_every_prompt_gets_the_suffix() -> None:
    llm = knowing(QWEN)
    await Client(llm).post(PATH, {"prompt": ["A", "C"], "suffix": "B", "add_special_tokens": False})
    assert [call.prompt for call in llm.calls] == [
        TextPrompt(f"<|fim_prefix|>{letter}<|fim_suffix|>B<|fim_middle|>", add_special_tokens=False)
        for letter in "AC"
    ]


@pytest.mark.parametrize("suffix", ["", None])
async def test_nothing_is_no_suffix(suffix: str | None) -> None:
    llm = knowing(QWEN)
    await Client(llm).post(PATH, {"prompt": "A", "suffix": suffix})
    assert llm.calls[0].prompt == TextPrompt("A")


@pytest.mark.parametrize("known", [{}, {"<|fim_prefix|>": 5, "<|fim_middle|>": 6}])
async def test_a_model_that_knows_no_gaps_refuses(known: dict[str, int]) -> None:
    llm = knowing(known)
    reply = await Client(llm).post(PATH, {"prompt": "A", "suffix": "B"})
    assert (reply.status, reply.error["param"]) == (400, "suffix")
    assert "this model" in reply.error["message"]
    assert not llm.calls


# A real one


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    flags = ["--model", "qwen2.5-coder-0.5b", "--max-model-len", "512"]
    with served(tmp_path_factory.mktemp("coder"), flags) as running:
        yield running


def fill_in(coder: ServedModel, before: str, **fields: Any) -> Any:
    request = {"prompt": before, "max_tokens": 16, "temperature": 0, "return_token_ids": True, **fields}
    status, reply = coder.request("POST", PATH, request)
    assert status == 200, reply
    return reply["choices"][0]


def test_a_coder_fills_the_gap(coder: ServedModel) -> None:
    before, after = "import math\n\ndef circle_area(radius):\n    ", "\n    return area\n"
    filled = fill_in(coder, before, suffix=after)
    assert filled["text"].startswith("area = math.pi * radius ** 2")
    assert "area =" not in fill_in(coder, before)["text"]  # that name comes after the gap only
    # The ids are from the model's own tokenizer_config.json.
    token_ids = filled["prompt_token_ids"]
    assert (token_ids[0], token_ids[-1]) == (151659, 151660)
    assert token_ids.count(151661) == 1


def test_the_suffix_of_a_model_without_gaps(server: ServedModel) -> None:
    status, reply = server.request("POST", PATH, {"prompt": "a", "suffix": "b"})
    assert (status, reply["error"]["param"]) == (400, "suffix")
