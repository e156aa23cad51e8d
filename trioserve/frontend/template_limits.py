"""What one rendering of a chat template may use: time, text, nesting."""

from __future__ import annotations

import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jinja2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "ITEM_SIZE",
    "MAX_BITS",
    "MAX_RENDER_SECONDS",
    "MAX_TEXT",
    "MAX_WORK",
    "RenderingLimits",
    "TemplateLimitError",
    "limits",
    "rendering_limits",
    "text_size",
]

MAX_RENDER_SECONDS = 1.0
"""Of processor time, so that a busy machine refuses nobody. Renderings of real conversations take less than a
millisecond, long ones some."""

MAX_TEXT = 8 * 2**20
"""Characters of the result, and of any value on the way to it."""

MAX_WORK = 4 * MAX_TEXT
"""Characters that all operations of one rendering may make together: the bound of its memory, as none of what
was made may have been given back. A character takes one to four bytes."""

ITEM_SIZE = 16
"""What an item of a list counts for, in characters: its place, and a part of a small object."""

MAX_BITS = 4096
"""Of an integer."""

_YIELD_EVERY = 0.001
_YIELD_FOR = 0.00005
"""Seconds. A rendering in a thread lets go of the GIL so often, lest the event loop wait for it each time."""


class TemplateLimitError(jinja2.TemplateError):
    """The rendering would take more than it may; the message says what."""


class RenderingLimits:
    """Counts for one rendering. Every method raises `TemplateLimitError` once a limit is passed."""

    def __init__(self, *, yields: bool) -> None:
        """With `yields` it runs beside others, and gives way to them now and then."""
        now = time.monotonic()
        self._deadline = now + MAX_RENDER_SECONDS  # put off by the time that went to others
        self._last_thread_time = time.thread_time() + MAX_RENDER_SECONDS
        self._yield_every = _YIELD_EVERY if yields else MAX_RENDER_SECONDS
        self._next_yield = now + self._yield_every
        self._work_left = MAX_WORK

    def tick(self) -> None:
        """Called at the head of each loop and in each call, so that no loop can go on for ever."""
        now = time.monotonic()
        if now < self._next_yield:
            return
        if now >= self._deadline:
            self._put_off_deadline(now)
        time.sleep(_YIELD_FOR)
        self._next_yield = min(now + self._yield_every, self._deadline)

    def _put_off_deadline(self, now: float) -> None:
        left = self._last_thread_time - time.thread_time()
        if left <= 0:
            raise TemplateLimitError(f"rendering took longer than {MAX_RENDER_SECONDS:g} s")
        self._deadline = now + left

    def foresee(self, size: int) -> None:
        """Refuse to make a value of `size` characters, if that is too many; else count nothing."""
        if size > MAX_TEXT or size > self._work_left:
            raise TemplateLimitError(f"it would make more than {MAX_TEXT} characters of text")

    def charge(self, value: Any) -> Any:
        """Count a value that was made; it is returned."""
        if isinstance(value, str):
            self._spend(len(value))
        elif isinstance(value, list | tuple | dict):
            self._spend(ITEM_SIZE * len(value))
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise TemplateLimitError(f"an integer has more than {MAX_BITS} bits")
        return value

    def ticking(self, values: Iterable[Any]) -> Iterator[Any]:
        """`values`, with a tick before each."""
        for value in values:
            self.tick()
            yield value

    def _spend(self, size: int) -> None:
        if size > MAX_TEXT:
            self.foresee(size)
        self._work_left -= size
        if self._work_left < 0:
            raise TemplateLimitError(f"it made more than {MAX_WORK} characters of text in all")


_current: ContextVar[RenderingLimits] = ContextVar("rendering_limits")


def limits() -> RenderingLimits:
    """Those of the rendering that goes on here."""
    return _current.get()


@contextmanager
def rendering_limits(*, yields: bool) -> Iterator[None]:
    """Within, `limits()` are new ones. The time begins here."""
    token = _current.set(RenderingLimits(yields=yields))
    try:
        yield
    finally:
        _current.reset(token)


_PLAIN = (str, int, float, bool, type(None), jinja2.Undefined)


def text_size(value: Any) -> int:
    """How many characters `value` has as text, its parts included as often as they occur, and more for each
    part: what it takes to look at.

    Python compares, hashes and prints nested lists without a way to interrupt it; a list of a list, twice in
    it each, and so on, takes 2^depth. So it is measured first.

    Raises:
      TemplateLimitError: it is larger than MAX_TEXT, or holds what is no text or data.
    """
    if isinstance(value, str):
        return len(value)
    size, found = 0, [value]
    while found:
        part = found.pop()
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, dict):
            found += part.keys()
            found += part.values()
        elif isinstance(part, list | tuple):
            found += part
        elif not isinstance(part, _PLAIN):
            raise TemplateLimitError(f"a value of type {type(part).__name__!r} cannot be shown as text")
        size += ITEM_SIZE
        if size + len(found) > MAX_TEXT:
            raise TemplateLimitError(f"a value has more than {MAX_TEXT} characters as text")
    return size
