"""Tells that an engine core does not answer any more: it is stopped, or a call in it holds the GIL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from trioserve.errors import ClosedError, EngineDeadError

if TYPE_CHECKING:
    from trioserve.link.client import EngineCoreClient

__all__ = ["SLICES", "wait_for_silence"]

SLICES = 5
"""Of a time that must not run out while this process is stopped: each begins anew when it goes on."""
_LONGEST_INTERVAL = 10.0
"""Seconds between an answer and the next ping, at most."""


class _Pings:
    """Pings that are answered, one after the other."""

    def __init__(self, client: EngineCoreClient, interval: float) -> None:
        self.num_answers = 0
        self._client = client
        self._interval = interval

    async def run(self) -> None:
        """Until cancelled, or the core has ended, which its reader tells."""
        try:
            while True:
                await trio.sleep(self._interval)
                await self._client.call("ping")
                self.num_answers += 1
        except (EngineDeadError, ClosedError):
            return


async def wait_for_silence(client: EngineCoreClient, patience: float) -> None:
    """Ping the core all the time, and return once it has answered nothing for `patience` seconds, or up to a
    fifth more.

    A core answers while a step runs, and while a control call loads weights. The time is counted in slices,
    and looked at after each: where this process itself was stopped, or busy with something else, that costs
    one slice, and then the answer that lies in the socket is found.
    """
    slice_time = patience / SLICES
    # At least two pings to a slice, so that none passes without an answer where there are answers.
    pings = _Pings(client, min(slice_time / 2, _LONGEST_INTERVAL))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pings.run)
        num_silent = 0
        while num_silent < SLICES:
            before = pings.num_answers
            await trio.sleep(slice_time)
            num_silent = num_silent + 1 if pings.num_answers == before else 0
        nursery.cancel_scope.cancel()
