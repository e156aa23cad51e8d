"""What a schema costs: time to compile, tokens per second with and without, and what jump-ahead gains.

python benchmarks/structured.py --model smollm2-135m --streams 8

The table of generation has a row per form of the output, with white space left to the model or not, and
jump-ahead (forced tokens computed together) on or off: output tokens, tokens per step of a sequence, seconds,
tokens per second. "free" and "list" are cut at --max-tokens, so they compute the same number of tokens; calls
of tools end by themselves.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import TYPE_CHECKING, Any

import trio

from trioserve import AsyncLLM, EngineArgs, SamplingParams, StructuredOutputsParams
from trioserve.link.grammar_compiler import GrammarCompiler

if TYPE_CHECKING:
    from trioserve.config import EngineConfig, ResolvedModel


def schema_of(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def call_of(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return schema_of({"name": {"const": name}, "arguments": schema_of(arguments)})


SCHEMAS = {
    "list": {
        "type": "array",
        "minItems": 50,
        "items": schema_of(
            {
                "name": {"type": "string", "maxLength": 20},
                "age": {"type": "integer", "minimum": 0, "maximum": 130},
            }
        ),
    },
    "weather": call_of(
        "get_current_weather",
        {
            "location": {"type": "string", "maxLength": 16},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "include_forecast": {"type": "boolean"},
        },
    ),
    "flight": call_of(
        "book_flight",
        {
            "origin_airport": {"type": "string", "pattern": "^[A-Z]{3}$"},
            "destination_airport": {"type": "string", "pattern": "^[A-Z]{3}$"},
            "departure_date": {"type": "string", "format": "date"},
            "passengers": {"type": "integer", "minimum": 1, "maximum": 9},
            "travel_class": {"enum": ["economy", "business"]},
        },
    ),
    "ticket": call_of(
        "create_ticket",
        {
            "project_key": {"type": "string", "pattern": "^[A-Z]{2,6}$"},
            "summary": {"type": "string", "maxLength": 30},
            "priority": {"enum": ["low", "medium", "high"]},
            "assign_to_reporter": {"type": "boolean"},
        },
    ),
}
FORMAT = "{:<9}{:>13}{:>12}{:>8}{:>13}{:>9}{:>10}"


async def time_to_compile(model: ResolvedModel, config: EngineConfig) -> None:
    """Milliseconds per schema: the first one has a process to wait for; and all again, from the cache."""
    async with GrammarCompiler.open(model, config.structured_outputs) as grammars:
        for attempt in ("compiled", "cached"):
            for name, schema in SCHEMAS.items():
                params = StructuredOutputsParams(json=schema)
                started = trio.current_time()
                await grammars.compile(params)
                milliseconds = (trio.current_time() - started) * 1e3
                print(f"{name:<9}{attempt:>10}{milliseconds:>9.2f} ms", flush=True)


def params_of(name: str, max_tokens: int, *, terse: bool) -> SamplingParams:
    """ "free": none."""
    form = None
    if name in SCHEMAS:
        form = StructuredOutputsParams(json=SCHEMAS[name], disable_any_whitespace=terse)
    return SamplingParams(
        max_tokens=max_tokens, temperature=0, structured_outputs=form, ignore_eos=form is None
    )


async def measure(llm: AsyncLLM, name: str, params: SamplingParams, streams: int) -> tuple[int, float, float]:
    """Tokens, tokens per step of a sequence, seconds."""
    question = f"Answer as JSON: {json.dumps(SCHEMAS.get(name, 'anything'))}"
    messages = [[{"role": "user", "content": f"{number + 1}. {question}"}] for number in range(streams)]
    prompts = [await llm.render_chat(message) for message in messages]
    for prompt in prompts:  # prompts and grammar are known then: only generation is measured
        await llm.complete(prompt, SamplingParams(max_tokens=1, structured_outputs=params.structured_outputs))
    before, started = llm.metrics.totals(), trio.current_time()
    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(llm.complete, prompt, params)
    seconds, after = trio.current_time() - started, llm.metrics.totals()
    tokens = after.generation_tokens - before.generation_tokens
    return tokens, tokens / (tokens - after.accepted_tokens + before.accepted_tokens), seconds


def engine_args(args: argparse.Namespace, *, jump_ahead: bool) -> EngineArgs:
    return EngineArgs.from_dict(
        {
            "model": args.model,
            "dtype": args.dtype,
            "structured_outputs_config": {"jump_ahead": jump_ahead},
            "log": {"stats_interval": 0},
        }
    )


async def rows(args: argparse.Namespace, jump_ahead: bool) -> None:
    arguments = engine_args(args, jump_ahead=jump_ahead)
    async with AsyncLLM.from_engine_args(arguments) as llm:
        if jump_ahead:
            await time_to_compile(llm.model, arguments.create_engine_config())
            print(
                FORMAT.format("form", "white space", "jump-ahead", "tokens", "tokens/step", "s", "tokens/s")
            )
        await measure(llm, "free", params_of("free", 8, terse=False), args.streams)
        for name, terse in itertools.product(["free", *SCHEMAS], [False, True]):
            if name == "free" and (terse or not jump_ahead):
                continue
            params = params_of(name, args.max_tokens, terse=terse)
            tokens, per_step, seconds = await measure(llm, name, params, args.streams)
            figures = (tokens, f"{per_step:.2f}", f"{seconds:.2f}", f"{tokens / seconds:.1f}")
            space, jump = "none" if terse else "any", "on" if jump_ahead else "off"
            print(FORMAT.format(name, space, jump, *figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    for jump_ahead in (True, False):
        trio.run(rows, args, jump_ahead)


if __name__ == "__main__":
    main()
