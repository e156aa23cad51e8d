"""What speculation gains where an answer repeats much of its prompt, and costs where it does not.

python benchmarks/speculation.py --model smollm2-135m --streams 1,8

Prints a table: prompts, streams at a time, guesses per step at most (0: no speculation), tokens per step of a
sequence, output tokens per second. The output is greedy, so all rows of the same prompts compute the same.
"""

from __future__ import annotations

import argparse
import itertools
from typing import TYPE_CHECKING

import trio

from trioserve import AsyncLLM, EngineArgs, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

CODE = """
def load_config(path):
    with open(path) as handle:
        data = json.load(handle)
    if "name" not in data:
        raise ValueError("name is missing")
    return Config(name=data["name"], size=data.get("size", 10))


def save_config(path, config):
    with open(path, "w") as handle:
        json.dump({"name": config.name, "size": config.size}, handle)


def merge_configs(first, second):
    name = first.name or second.name
    size = max(first.size, second.size)
    return Config(name=name, size=size)
"""
NOTICE = """
The library will be closed on Monday, 3 March, because the heating in the main hall is being replaced. Books
that are due on that day may be returned until Wednesday, 5 March, without a fee. The reading room on the
second floor stays open from nine in the morning until five in the afternoon, and can be reached through the
side entrance in Mill Street.
"""
PROMPTS = {
    "code edit": "Rewrite this Python code and rename the variable handle to file. "
    "Answer with the code only.\n" + CODE,
    "summary": "Summarise this notice by quoting its most important sentences word for word:\n" + NOTICE,
    "correction": "Repeat this text, and correct the spelling:\n" + NOTICE.replace("heating", "heeting"),
    "story": "Write a story about a river, a stone, the light, a cloud and an engine.",
}
FORMAT = "{:<12}{:>8}{:>9}{:>13}{:>10}"


async def measure(llm: AsyncLLM, text: str, streams: int, max_tokens: int) -> tuple[float, float]:
    """Tokens per step of a sequence, and tokens per second."""
    prompts = [
        await llm.render_chat([{"role": "user", "content": f"{number + 1}. {text}"}])
        for number in range(streams)
    ]
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    before, started = llm.metrics.totals(), trio.current_time()
    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(llm.complete, prompt, params)
    seconds, after = trio.current_time() - started, llm.metrics.totals()
    tokens = after.generation_tokens - before.generation_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    return tokens / (tokens - accepted), tokens / seconds


async def rows(args: argparse.Namespace, guesses: int) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": guesses} if guesses else None
    engine_args = EngineArgs.from_dict(
        {
            "model": args.model,
            "dtype": args.dtype,
            "speculative_config": speculation,
            "log": {"stats_interval": 0},
            "enable_prefix_caching": False,
        }
    )
    async with AsyncLLM.from_engine_args(engine_args) as llm:
        await measure(llm, "Hello", 1, 8)  # the first steps of an engine are slower
        for streams, (name, text) in itertools.product(numbers(args.streams), PROMPTS.items()):
            per_step, per_second = await measure(llm, text, streams, args.max_tokens)
            print(FORMAT.format(name, streams, guesses, f"{per_step:.2f}", f"{per_second:.1f}"), flush=True)


def numbers(text: str) -> Iterator[int]:
    return map(int, text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--guesses", default="0,8")
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    print(FORMAT.format("prompts", "streams", "guesses", "tokens/step", "tokens/s"))
    for guesses in numbers(args.guesses):
        trio.run(rows, args, guesses)


if __name__ == "__main__":
    main()
