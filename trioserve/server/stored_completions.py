"""OpenAI's routes for chat completions that were stored: here, none is."""

from __future__ import annotations

from typing import NoReturn

from trioserve.server.errors import completions_not_stored

__all__ = ["refuse_stored_completions"]


async def refuse_stored_completions(completion_id: str | None = None) -> NoReturn:
    """
    Raises:
      ApiError: always.
    """
    raise completions_not_stored(completion_id)
