"""The LoRA adapters that requests may have, by their names."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.config import LoRAModule
from trioserve.errors import (
    ClosedError,
    EngineDeadError,
    EngineRestartingError,
    EngineStartError,
    InvalidRequestError,
    LoRANotFoundError,
)
from trioserve.frontend.arguments import check_type
from trioserve.lora_request import LoRARequest
from trioserve.validators import shown

if TYPE_CHECKING:
    from trioserve.config import EngineConfig
    from trioserve.link.client import EngineCoreClient

__all__ = ["Adapter", "Adapters"]

log = logging.getLogger(__name__)


@attrs.define(eq=False, kw_only=True)
class Adapter:
    """One that is loaded. `Adapters` and `Requests` alone change it."""

    key: str
    """Its name in the engine, which no other adapter ever has: what is cached with it is its own."""
    name: str
    path: str
    """As it was given."""
    base_model_name: str | None
    created: int
    """Unix time."""
    is_listed: bool = True
    """New requests may have it."""
    successor: Adapter | None = None
    """What has replaced it."""
    num_holders: int = 0
    """Requests that have it. The engine keeps it for them, listed or not."""
    _forget: Callable[[Adapter], None]

    def hold(self) -> Adapter:
        """A request has it from here on, or what has replaced it meanwhile: the one that is returned, whose
        `let_go` is to be called at its end.

        Raises:
          LoRANotFoundError: it has been unloaded.
        """
        adapter = self
        while adapter.successor is not None:
            adapter = adapter.successor
        if not adapter.is_listed and not adapter.num_holders:
            raise _not_loaded(adapter.name)
        adapter.num_holders += 1
        return adapter

    def let_go(self) -> None:
        """Not a checkpoint. The engine must know by now that the request has ended."""
        self.num_holders -= 1
        self.drop_if_unused()

    def drop_if_unused(self) -> None:
        if not self.is_listed and not self.num_holders:
            self._forget(self)


class Adapters:
    """Every adapter is here from the moment at which the engine has it until nobody needs it: it is
    unloaded, or replaced, and the last request that has it has ended. A new engine core gets all of them
    again."""

    # Invariants: _by_name has the listed ones; _kept has these and the held ones, by key, and at most
    # max_loaded when one begins to be loaded (one that is replaced makes room once the new one is there).

    def __init__(self, config: EngineConfig, get_client: Callable[[], EngineCoreClient]) -> None:
        """`get_client` raises EngineDeadError, EngineRestartingError or ClosedError where there is no
        engine."""
        self._config = config.lora
        self._model_names = config.model.served_model_names
        self._get_client = get_client
        self._numbers = itertools.count(1)
        self._by_name: dict[str, Adapter] = {}
        self._kept: dict[str, Adapter] = {}
        self._sent: Sequence[LoRAModule] = ()  # to the core that starts
        self._has_started = False
        self._loading = trio.Lock()  # one after the other, so that nothing is loaded twice
        for module in () if config.lora is None else config.lora.modules:
            self._keep(self._make(module))

    # For requests

    async def find(self, request: LoRARequest | None) -> Adapter | None:
        """The adapter of a request, loaded if need be. A checkpoint only then.

        Raises as `load` does; LoRANotFoundError also if there is none of this name, and no path to it.
        """
        if request is None:
            return None
        self._check_enabled()
        check_type("lora_request", request, LoRARequest)
        adapter = self._by_name.get(request.lora_name)
        if adapter is None or request.load_inplace or request.lora_path not in {None, adapter.path}:
            await self.load(request, again=request.load_inplace, known_is_fine=True)
        return self.get(request.lora_name)

    def get(self, name: str) -> Adapter:
        """
        Raises:
          LoRANotFoundError: there is no such adapter.
        """
        if name not in self._by_name:
            raise _not_loaded(name)
        return self._by_name[name]

    def has(self, name: str) -> bool:
        return name in self._by_name

    def list(self) -> Sequence[Adapter]:
        """Those that new requests may have, the oldest first."""
        return list(self._by_name.values())

    # Loading and unloading

    async def load(self, request: LoRARequest, *, again: bool = False, known_is_fine: bool = False) -> None:
        """Let requests have an adapter. Cancelling leaves it as it was.

        Args:
          again: also if there is one of this name, which this one replaces. Requests that have the old one
            keep it to their end.
          known_is_fine: do nothing if this one is there.

        Raises:
          LoRANotFoundError: there is no adapter in its directory.
          InvalidRequestError: it cannot be used, the name is taken, there are too many, or the engine was
            started without adapters.
          EngineDeadError, EngineRestartingError, ClosedError: there is no engine.
        """
        self._check_enabled()
        check_type("lora_request", request, LoRARequest)
        async with self._loading:
            old = self._by_name.get(request.lora_name)
            if known_is_fine and not again and old is not None and request.lora_path in {None, old.path}:
                return
            adapter = self._make(self._checked(request, may_exist=again))
            await self._load(adapter)
            if old is not None:
                old.successor = adapter
                if old.is_listed:  # it may have been unloaded meanwhile
                    self._unlist(old)
            self._keep(adapter)
        log.info("LoRA adapter %s loaded", request.lora_name)

    def unload(self, name: str) -> None:
        """Let no new request have it; those that have it keep it to their end. Not a checkpoint.

        Raises:
          LoRANotFoundError: there is no such adapter.
          InvalidRequestError: the engine was started without adapters.
        """
        self._check_enabled()
        self._unlist(self.get(name))
        log.info("LoRA adapter %s unloaded", name)

    def _check_enabled(self) -> None:
        if self._config is None:
            raise InvalidRequestError(
                "LoRA adapters cannot be used: the engine was started without enable_lora.",
                parameter="lora_request",
            )

    def _checked(self, request: LoRARequest, *, may_exist: bool) -> LoRAModule:
        name, path = request.lora_name, request.lora_path
        if path is None:
            raise _not_loaded(name)
        if name in self._model_names:
            raise InvalidRequestError(
                f"lora_name must not be the model's own name, got {shown(name)}.", parameter="lora_name"
            )
        if name in self._by_name and not may_exist:
            raise InvalidRequestError(
                f"lora_name must not be in use, got {shown(name)}, which is loaded: unload it first, or set "
                "load_inplace.",
                parameter="lora_name",
            )
        assert self._config is not None
        if len(self._kept) - (name in self._by_name) >= self._config.max_loaded:
            raise InvalidRequestError(
                f"max_cpu_loras={self._config.max_loaded} adapters are in memory: unload one first.",
                parameter="lora_name",
            )
        return LoRAModule(name=name, path=path, base_model_name=request.base_model_name)

    async def _load(self, adapter: Adapter) -> None:
        client = self._get_client()
        try:
            failure = await client.call("load_lora", adapter.key, adapter.path)
        except BaseException:
            client.tell("unload_lora", adapter.key)  # it may be there, or on its way
            raise
        if failure is None:
            return
        is_missing, message = failure
        if is_missing:
            raise LoRANotFoundError(message)
        raise InvalidRequestError(message, parameter="lora_path")

    def _make(self, module: LoRAModule) -> Adapter:
        return Adapter(
            key=f"{module.name}#{next(self._numbers)}",
            name=module.name,
            path=module.path,
            base_model_name=module.base_model_name,
            created=int(time.time()),
            forget=self._forget,
        )

    def _keep(self, adapter: Adapter) -> None:
        self._by_name[adapter.name] = self._kept[adapter.key] = adapter

    def _unlist(self, adapter: Adapter) -> None:
        del self._by_name[adapter.name]
        adapter.is_listed = False
        adapter.drop_if_unused()

    def _forget(self, adapter: Adapter) -> None:
        if self._kept.pop(adapter.key, None) is None:
            return
        try:
            self._get_client().tell("unload_lora", adapter.key)
        except (EngineDeadError, EngineRestartingError, ClosedError):
            return  # gone with it; `take_over` tells one that starts

    # An engine core's start

    def for_core(self, config: EngineConfig) -> EngineConfig:
        """What a core that starts now is to be: it loads what is kept, under its keys."""
        if config.lora is None:
            return config
        self._sent = [LoRAModule(name=kept.key, path=kept.path) for kept in self._kept.values()]
        return attrs.evolve(config, lora=attrs.evolve(config.lora, modules=tuple(self._sent)))

    def take_over(self, client: EngineCoreClient) -> None:
        """The core that was given `for_core` is ready. Not a checkpoint.

        Raises:
          EngineStartError: it is the first one, and could not load all of them. Later ones go on without.
        """
        failed = client.ready.failed_adapters
        if failed and not self._has_started:
            raise EngineStartError(f"lora_modules: {'; '.join(failed.values())}")
        self._has_started = True
        for key, reason in failed.items():
            if (adapter := self._kept.pop(key, None)) is not None:
                log.error("LoRA adapter %s is lost with the engine core: %s", adapter.name, reason)
                if adapter.is_listed:
                    self._unlist(adapter)
        for module in self._sent:
            if module.name not in self._kept and module.name not in failed:
                client.tell("unload_lora", module.name)


def _not_loaded(name: str) -> LoRANotFoundError:
    return LoRANotFoundError(f"No LoRA adapter is loaded under the name {shown(name)}.")
