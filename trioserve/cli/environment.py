"""The environment variables that the command line reads; nothing else in trioserve reads any of its own."""

from __future__ import annotations

import os

from trioserve.errors import InvalidConfigError

__all__ = ["api_key_from_environment", "take_api_keys_from_environment"]

_API_KEY = "TRIOSERVE_API_KEY"


def api_key_from_environment() -> str | None:
    """What `chat` and `complete` send: the first key of $TRIOSERVE_API_KEY."""
    return next(iter(_split(os.environ.get(_API_KEY, ""))), None)


def take_api_keys_from_environment() -> tuple[str, ...]:
    """What `serve` demands from clients: the keys of $TRIOSERVE_API_KEY, between commas or white space.

    The variable is removed, so that child processes do not inherit it.

    Raises:
      InvalidConfigError: there is something in it, and no key: then a server would be open by mistake.
    """
    given = os.environ.pop(_API_KEY, "")
    if given and not (keys := _split(given)):
        raise InvalidConfigError(f"${_API_KEY} must hold a key or be empty.", field="api_key")
    return keys if given else ()


def _split(keys: str) -> tuple[str, ...]:
    return tuple(keys.replace(",", " ").split())
