"""Where an answer repeats much of its prompt, a step gives several tokens; and always the same ones."""

from __future__ import annotations

from typing import Any

import attrs

from served import MODEL
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


@attrs.frozen
class Answer:
    token_ids: list[int]
    tokens_per_step: float


async def answers(**values: Any) -> list[Answer]:
    """To each of the prompts, one after the other."""
    args = {"model": MODEL, "dtype": "float32", "log": {"stats_interval": 0}, **values}
    found = []
    async with AsyncLLM.from_engine_args(EngineArgs.from_dict(args)) as llm:
        for text in COPYING:
            before = llm.metrics.totals()
            prompt = await llm.render_chat([{"role": "user", "content": text}])
            token_ids = list((await llm.complete(prompt, GREEDY)).outputs[0].token_ids)
            after = llm.metrics.totals()
            num_tokens = after.generation_tokens - before.generation_tokens
            assert num_tokens == len(token_ids)
            # A step gives a token of its own and those drafts that were right.
            num_steps = num_tokens - (after.accepted_tokens - before.accepted_tokens)
            found.append(Answer(token_ids, num_tokens / num_steps))
    return found


async def test_copying_takes_fewer_steps_and_gives_the_same() -> None:
    plain = await answers()
    speculative = await answers(speculative_config={"method": "ngram", "num_speculative_tokens": 8})
    assert [answer.tokens_per_step for answer in plain] == [1.0] * len(COPYING)
    for answer, expected in zip(speculative, plain, strict=True):
        assert answer.token_ids == expected.token_ids
        assert answer.tokens_per_step > TOKENS_PER_STEP, [a.tokens_per_step for a in speculative]
