"""The engine inside a trio program: two requests at once, and one that is cut short by a deadline."""

from __future__ import annotations

import trio

from trioserve import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams


async def tell(llm: AsyncLLM, prompt: str) -> None:
    params = SamplingParams(max_tokens=32, temperature=0, output_kind=RequestOutputKind.DELTA)
    async with llm.stream(prompt, params) as outputs:
        async for output in outputs:
            print(output.outputs[0].text, end="", flush=True)
    print()


async def main() -> None:
    async with AsyncLLM.from_engine_args(EngineArgs()) as llm:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell, llm, "The capital of France is")
            nursery.start_soon(tell, llm, "Water boils at")

        # Leaving a request's scope ends it in the engine too, whatever the reason.
        with trio.move_on_after(0.5):
            await llm.complete("Count to a million: 1, 2, 3,", SamplingParams(max_tokens=4000))


if __name__ == "__main__":
    trio.run(main)
