"""Where responses live: the store that keeps them, and the nursery of those in the background."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs

from trioserve.errors import InvalidConfigError
from trioserve.server.responses.background import Background
from trioserve.server.responses.memory_store import MemoryStore
from trioserve.server.responses.sqlite_store import open_sqlite_store
from trioserve.server.responses.store import ResponseStore, StoreLimits
from trioserve.server_args import RESPONSES_IN_MEMORY, RESPONSES_NOWHERE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trioserve.server_args import ServerArgs

__all__ = ["ResponsesHome", "open_response_store"]


@attrs.frozen(eq=False)
class ResponsesHome:
    """Whoever serves an application makes one, and owns what is in it.

    async with open_response_store(args) as store, llm, open_background(64) as background:
        app = create_app(llm, args, responses=ResponsesHome(store, background))
    """

    store: ResponseStore | None
    """None: nothing is kept."""
    background: Background | None = None
    """None: there are no background responses."""

    @classmethod
    def without_owner(cls, args: ServerArgs) -> ResponsesHome:
        """For an application that nobody made one for: what needs no closing.

        Raises:
          InvalidConfigError: `args` want a file.
        """
        if args.responses_store == RESPONSES_NOWHERE:
            return cls(None)
        if args.responses_store == RESPONSES_IN_MEMORY:
            return cls(MemoryStore(_limits(args)))
        raise InvalidConfigError(
            f"responses_store must be memory or none without an open store (see open_response_store), "
            f"got {args.responses_store!r}.",
            field="responses_store",
        )


@asynccontextmanager
async def open_response_store(args: ServerArgs) -> AsyncIterator[ResponseStore | None]:
    """The store that `args` want; None if they want none.

    Raises:
      InvalidConfigError: the file cannot be used.
    """
    if args.responses_store in {RESPONSES_IN_MEMORY, RESPONSES_NOWHERE}:
        yield ResponsesHome.without_owner(args).store
        return
    async with open_sqlite_store(args.responses_store, _limits(args)) as store:
        yield store


def _limits(args: ServerArgs) -> StoreLimits:
    return StoreLimits(
        max_responses=args.responses_store_max_responses,
        max_bytes=args.responses_store_max_bytes,
        ttl=args.responses_store_ttl,
    )
