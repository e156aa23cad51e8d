"""What engine cores are told of adapters."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

from fake_engine import FakeEngineClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def lora_calls(client: FakeEngineClient) -> list[tuple[Any, ...]]:
    return [call for call in client.calls if "lora" in call[0]]


class Cores:
    """Each core is a new client; what it was told of adapters."""

    def __init__(self) -> None:
        self.clients: list[FakeEngineClient] = []
        self.told: list[list[str]] = []
        self.failing: dict[str, str] = {}
        self.gate = trio.Event()
        self.gate.set()

    @asynccontextmanager
    async def open(self, config: Any, _: object) -> AsyncIterator[FakeEngineClient]:
        self.told.append([module.name for module in config.lora.modules])
        await self.gate.wait()
        client = FakeEngineClient()
        client.answers["load_lora"] = None
        client.ready = attrs.evolve(client.ready, failed_adapters=self.failing)
        self.clients.append(client)
        yield client
