"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter (`--enable-lora-updates`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.errors import InvalidConfigError, InvalidRequestError
from trioserve.lora_request import LoRARequest
from trioserve.server.errors import naming
from trioserve.server.protocol.lora import LOAD_LORA_READER, UNLOAD_LORA_READER
from trioserve.server.replies import text_reply
from trioserve.server.served_models import ServedModels
from trioserve.server.service import Service
from trioserve.validators import shown
from trioserve.worker.lora_config import ADAPTER_FILES

if TYPE_CHECKING:
    from quart import Response

    from trioserve.server_args import ServerArgs

__all__ = ["LoRAUpdates"]


@attrs.frozen(eq=False)
class LoRAUpdates:
    """The handlers. Which files the server opens is up to the client, within the operator's directories."""

    _models: ServedModels
    _with_adapters: Sequence[Service]
    """The models that were started so that they can have adapters."""
    _directories: tuple[Path, ...]
    """Without symbolic links."""
    _loading: trio.Lock = attrs.field(init=False, factory=trio.Lock)

    @classmethod
    def of(cls, models: ServedModels, args: ServerArgs) -> LoRAUpdates:
        """
        Raises:
          InvalidConfigError: no engine was started with adapters.
        """
        with_adapters = [service for service in models.services if service.llm.config.lora is not None]
        if not with_adapters:
            raise InvalidConfigError(
                "enable_lora_updates must be false without enable_lora, got True.",
                field="enable_lora_updates",
            )
        directories = tuple(Path(directory).resolve() for directory in args.lora_directories)
        return cls(models, with_adapters, directories)

    async def load(self) -> Response:
        """A client that leaves before it is loaded leaves everything as it was."""
        request = await self._with_adapters[0].read_request(LOAD_LORA_READER)
        service = self._models.pick(request.model, self._with_adapters)
        path = await trio.to_thread.run_sync(self._find_directory, request.lora_path)
        wanted = LoRARequest(request.lora_name, lora_path=path, load_inplace=bool(request.load_inplace))
        with naming({"lora_request": "lora_path"}):
            await self._load(service, wanted)
        return text_reply(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    async def _load(self, service: Service, wanted: LoRARequest) -> None:
        if self._models.only is not None:
            await service.llm.load_lora(wanted)
            return
        async with self._loading:  # no two models may take the same name
            holder = self._models.find(wanted.lora_name)
            if holder is not None and holder is not service:
                raise InvalidRequestError(
                    f"lora_name must not be in use by another model, got {shown(wanted.lora_name)}, which is "
                    f"one of {shown(holder.model_names[0])}.",
                    parameter="lora_name",
                )
            await service.llm.load_lora(wanted)

    async def unload(self) -> Response:
        """Requests that have it run on to their end."""
        request = await self._with_adapters[0].read_request(UNLOAD_LORA_READER)
        holders = (each for each in self._with_adapters if each.llm.has_lora(request.lora_name))
        service = next(holders, self._with_adapters[0])
        with naming({"lora_request": "lora_name"}):
            await service.llm.unload_lora(request.lora_name)
        return text_reply(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    def _find_directory(self, path: str) -> str:
        """Without symbolic links, so that an engine core that starts later reads the same one. Blocks.

        Raises:
          InvalidRequestError: it leads out of the operator's directories, or one of its files does.
        """
        directory = os.path.realpath(path)
        for name in ("", *ADAPTER_FILES):
            real = Path(os.path.realpath(os.path.join(directory, name)))
            if not any(real.is_relative_to(allowed) for allowed in self._directories):
                raise InvalidRequestError(
                    f"lora_path must be in a directory that this server allows (--lora-directories), and so "
                    f"must its files, got {shown(path)}.",
                    parameter="lora_path",
                )
        return directory
