"""Logging for the command line; a library leaves it to its embedder."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioserve.config import LogConfig

__all__ = ["configure_logging"]


def configure_logging(config: LogConfig) -> None:
    """Our loggers to stderr, at the configured level; other libraries' from warnings up."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("trioserve").setLevel(config.level.upper())
