"""The adapters that an engine core has."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from trioserve.errors import InvalidRequestError, LoRANotFoundError, TrioserveError

if TYPE_CHECKING:
    from trioserve.config import LoRAConfig
    from trioserve.link.service import SteeredRunner
    from trioserve.link.step_thread import StepThread

__all__ = ["LoadedAdapters"]

log = logging.getLogger(__name__)


class LoadedAdapters:
    """Loads and unloads, one at a time and in the order of the calls, while steps run.

    Files are read in a thread of its own; what is computed for it waits for the step that runs. The client
    sees to it that no request has an adapter that it unloads, and that there are not too many.
    """

    def __init__(self, thread: StepThread, runner: SteeredRunner) -> None:
        self._thread = thread
        self._runner = runner
        self._keys: set[str] = set()
        self._turn = trio.Lock()  # first come, first served

    def check(self, key: str | None) -> None:
        """
        Raises:
          InvalidRequestError: there is no such adapter.
        """
        if key is not None and key not in self._keys:
            raise InvalidRequestError(f"There is no LoRA adapter {key!r}.", parameter="lora_request")

    async def load(self, key: str, path: str) -> tuple[bool, str] | None:
        """None, or why it could not be done: whether there was nothing to load, and the reason."""
        async with self._turn:
            try:
                file = await trio.to_thread.run_sync(self._runner.read_adapter, path)
                await self._thread.run(self._runner.add_adapter, key, file)
            except TrioserveError as error:
                return isinstance(error, LoRANotFoundError), str(error)
            except Exception as error:  # whatever a file can make its readers raise: it ends no engine
                log.exception("LoRA adapter %s cannot be loaded", key)
                return False, f"The LoRA adapter cannot be loaded: {error!r}"
            self._keys.add(key)
        return None

    async def unload(self, key: str) -> None:
        """Fine also if there is no such adapter."""
        async with self._turn:
            self._keys.discard(key)
            await self._thread.run(self._runner.remove_adapter, key)

    async def load_all(self, config: LoRAConfig | None) -> dict[str, str]:
        """Those that the client begins with. Key -> reason, of those that could not be loaded."""
        failed = {}
        for module in () if config is None else config.modules:
            if (failure := await self.load(module.name, module.path)) is not None:
                failed[module.name] = failure[1]
        return failed
