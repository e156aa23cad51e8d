"""A request whose prompt comes in pieces: each is answered with all that came before in mind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from trioserve import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def pieces() -> AsyncIterator[str]:
    """As they would come from a microphone or a socket; the engine waits for the next one."""
    yield "France: the capital is"
    await trio.sleep(0.1)
    yield "\nItaly: the capital is"


async def main() -> None:
    params = SamplingParams(max_tokens=2, temperature=0, output_kind=RequestOutputKind.DELTA)
    async with (
        AsyncLLM.from_engine_args(EngineArgs()) as llm,
        llm.stream(pieces(), params) as outputs,
    ):
        async for output in outputs:
            for completion in output.outputs:
                print(completion.text, end="\n" if completion.finished else "", flush=True)


if __name__ == "__main__":
    trio.run(main)
