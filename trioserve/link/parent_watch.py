"""A child that must not outlive its parent, whatever its own threads are doing."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ask_kernel_for_death_signal", "dies_with_parent"]

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def ask_kernel_for_death_signal() -> None:
    """SIGKILL when the thread that forked us ends, even while a C call holds the GIL. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(link_fd: int, stop_fd: int) -> None:
    poll = select.poll()
    poll.register(link_fd, 0)  # only POLLHUP: a half-close is an orderly request to end, and no hangup
    poll.register(stop_fd, select.POLLIN)
    for fd, event in poll.poll():
        # At an orderly end this process has closed the link itself, which is another event: POLLNVAL.
        if fd == link_fd and event & select.POLLHUP:
            os._exit(1)  # nobody is left to tell, and nothing here outlives the process


@contextmanager
def dies_with_parent(link_fd: int) -> Iterator[None]:
    """End this process at once when the other end of the socket `link_fd` has been closed.

    A thread waits for the hangup, so that it works while the main thread computes; it is joined on exit.
    The kernel's parent-death signal covers the case where a C call holds the GIL meanwhile.
    """
    ask_kernel_for_death_signal()
    stop_reading, stop_writing = os.pipe()
    thread = threading.Thread(target=_watch, args=(link_fd, stop_reading), name="parent-watch")
    thread.start()
    try:
        yield
    finally:
        os.write(stop_writing, b"x")
        thread.join()
        os.close(stop_reading)
        os.close(stop_writing)
