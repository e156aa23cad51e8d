"""Where an answer repeats much of its prompt, a step gives several tokens; and always the same ones."""

from __future__ import annotations

from typing import Any

import trio

from served import MODEL, STEADY
from trioserve import AsyncLLM, EngineArgs, SamplingParams

CODE = """def load_config(path):
    with open(path) as handle:
        data = json.load(handle)
    if "name" not in data:
        raise ValueError("name is missing")
    return Config(name=data["name"], size=data.get("size", 10))


def save_config(path, config):
    with open(path, "w") as handle:
        json.dump({"name": config.name, "size": config.size}, handle)
"""
NOTICE = (
    "The library will be closed on Monday, 3 March, because the heating in the main hall is being replaced. "
    "Books that are due on that day may be returned until Wednesday, 5 March, without a fee. The reading "
    "room on the second floor stays open from nine in the morning until five in the afternoon, and can be "
    "reached through the side entrance in Mill Street."
)
COPYING = [
    f"Rewrite this Python code and rename the variable handle to file. Answer with the code only.\n\n{CODE}",
    f"Summarise this notice by quoting its most important sentences word for word:\n\n{NOTICE}",
    f"Repeat this text, and correct the spelling:\n\n{NOTICE.replace('heating', 'heeting')}",
]
GREEDY = SamplingParams(max_tokens=96, temperature=0)
TOKENS_PER_STEP = 1.8


def new_llm(**values: Any) -> AsyncLLM:
    args = {"model": MODEL, "dtype": STEADY, "threads": 1, "log": {"stats_interval": 0}, **values}
    return AsyncLLM.from_engine_args(EngineArgs.from_dict(args))


async def answer(llm: AsyncLLM, text: str) -> list[int]:
    prompt = await llm.render_chat([{"role": "user", "content": text}])
    return list((await llm.complete(prompt, GREEDY)).outputs[0].token_ids)


async def answers_of_plain_steps() -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}

    async def run(llm: AsyncLLM, text: str) -> None:
        answers[text] = await answer(llm, text)

    async with new_llm() as llm:
        async with trio.open_nursery() as nursery:
            for text in COPYING:
                nursery.start_soon(run, llm, text)
        assert llm.metrics.totals().draft_tokens == 0
    return answers


async def test_copying_takes_fewer_steps_and_gives_the_same() -> None:
    expected = await answers_of_plain_steps()
    async with new_llm(speculative_config={"method": "ngram", "num_speculative_tokens": 8}) as llm:
        for text in COPYING:
            before = llm.metrics.totals()
            token_ids = await answer(llm, text)
            after = llm.metrics.totals()
            assert token_ids == expected[text]
            num_tokens = after.generation_tokens - before.generation_tokens
            assert num_tokens == len(token_ids)
            # A step gives a token of its own and those drafts that were right.
            num_steps = num_tokens - (after.accepted_tokens - before.accepted_tokens)
            assert num_tokens / num_steps > TOKENS_PER_STEP, text
