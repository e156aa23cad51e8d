"""An engine core where the configuration wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.link.process import open_process_client

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.link.client import EngineCoreClient

__all__ = ["open_client"]


def open_client(config: EngineConfig, model: ResolvedModel) -> AbstractAsyncContextManager[EngineCoreClient]:
    """A client of a new engine core; its scope owns the core. Raises EngineStartError on entering."""
    if config.engine == "process":
        return open_process_client(config, model)
    # Brings the core's side of the link, and the grammar compiler, into this process.
    from trioserve.link.inproc import open_inproc_client  # noqa: PLC0415

    return open_inproc_client(config, model)
