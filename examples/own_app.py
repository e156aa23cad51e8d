"""trioserve inside a web application of your own: `hypercorn -k trio examples.own_app:app`, or run this file.

Your nursery owns the engine; the routes of the OpenAI API are mounted below /llm, beside your own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from quart_trio import QuartTrio

from trioserve import AsyncLLM, EngineArgs, SamplingParams
from trioserve.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Scope = dict[str, object]
    ASGI = Callable[[Scope, object, object], Awaitable[None]]


def create_own_app(llm: AsyncLLM) -> ASGI:
    own = QuartTrio(__name__)

    @own.get("/haiku")
    async def haiku() -> str:
        output = await llm.complete("A haiku about rivers:\n", SamplingParams(max_tokens=24))
        return output.outputs[0].text

    openai_api = create_app(llm)

    async def dispatch(scope: Scope, receive: object, send: object) -> None:
        path = str(scope.get("path", ""))
        if scope["type"] == "http" and path.startswith("/llm/"):
            await openai_api({**scope, "path": path.removeprefix("/llm")}, receive, send)
        else:
            await own(scope, receive, send)

    return dispatch


async def main() -> None:
    config = Config()
    config.bind = ["127.0.0.1:8001"]
    async with AsyncLLM.from_engine_args(EngineArgs()) as llm:
        await serve(create_own_app(llm), config)


if __name__ == "__main__":
    trio.run(main)
