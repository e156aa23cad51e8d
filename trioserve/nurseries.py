"""Two habits around nurseries."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import trio

__all__ = ["end_nursery", "ungrouped"]


def end_nursery(nursery: trio.Nursery) -> None:
    """Cancel what runs in `nursery`, as the last thing its body does after all went well.

    Shielded, so that a cancellation from outside does not surface in the middle of closing: the children end
    by this one, promptly, as everything that is cancelled must. (After an error there is nothing to call:
    the error leaves the body and the nursery cancels them. In a `finally` this would swallow a Cancelled.)
    """
    nursery.cancel_scope.shield = True
    nursery.cancel_scope.cancel()


@contextmanager
def ungrouped() -> Iterator[None]:
    """Re-raise the only error of a group in the group's place; a group of several passes as it is.

    Nurseries report errors in groups, and callers of a public function expect the error itself.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if error is group:
            raise
        raise error from error.__cause__
