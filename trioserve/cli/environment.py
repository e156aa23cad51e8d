"""The environment variables that the command line reads; nothing else in trioserve reads any of its own."""

from __future__ import annotations

import os

__all__ = ["api_key_from_environment"]


def api_key_from_environment() -> str | None:
    """$TRIOSERVE_API_KEY: what `serve` demands from clients, and what `chat` and `complete` send."""
    return os.environ.get("TRIOSERVE_API_KEY") or None
