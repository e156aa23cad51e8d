"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter (`--enable-lora-updates`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.errors import InvalidConfigError, InvalidRequestError
from trioserve.lora_request import LoRARequest
from trioserve.server.errors import naming
from trioserve.server.protocol.lora import LOAD_LORA_READER, UNLOAD_LORA_READER
from trioserve.server.replies import text_reply
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

    _service: Service
    _directories: tuple[Path, ...]
    """Without symbolic links."""

    @classmethod
    def of(cls, service: Service, args: ServerArgs) -> LoRAUpdates:
        """
        Raises:
          InvalidConfigError: the engine was started without adapters.
        """
        if service.llm.config.lora is None:
            raise InvalidConfigError(
                "enable_lora_updates must be false without enable_lora, got True.",
                field="enable_lora_updates",
            )
        return cls(service, tuple(Path(directory).resolve() for directory in args.lora_directories))

    async def load(self) -> Response:
        """A client that leaves before it is loaded leaves everything as it was."""
        request = await self._service.read_request(LOAD_LORA_READER)
        path = await trio.to_thread.run_sync(self._find_directory, request.lora_path)
        wanted = LoRARequest(request.lora_name, lora_path=path, load_inplace=bool(request.load_inplace))
        with naming({"lora_request": "lora_path"}):
            await self._service.llm.load_lora(wanted)
        return text_reply(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    async def unload(self) -> Response:
        """Requests that have it run on to their end."""
        request = await self._service.read_request(UNLOAD_LORA_READER)
        with naming({"lora_request": "lora_name"}):
            await self._service.llm.unload_lora(request.lora_name)
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
