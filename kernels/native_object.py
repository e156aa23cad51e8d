"""Objects that live in the CPU engine's library."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from numpy.typing import NDArray

    from trioserve_kernels.native_library import Library

__all__ = ["NativeObject", "address_of", "check"]


def check(field: str, value: int, low: int, high: int = 2**31 - 1) -> None:
    """Raise ValueError unless low <= value <= high."""
    if not low <= value <= high:
        allowed = f"at least {low}" if high == 2**31 - 1 else f"between {low} and {high}"
        msg = f"{field} is {value}; it must be {allowed}"
        raise ValueError(msg)


def address_of(field: str, data: NDArray[Any] | int, nbytes: int) -> int:
    """Where `nbytes` bytes of data begin. An address is taken as it is; it must not be null."""
    if isinstance(data, int):
        check(field, data, 1, 2**64 - 1)
        return data
    if not data.flags.c_contiguous:
        msg = f"{field} is an array with strides {data.strides}; it must be contiguous"
        raise ValueError(msg)
    if data.nbytes != nbytes:
        msg = f"{field} is an array of {data.nbytes} bytes; it must have {nbytes}"
        raise ValueError(msg)
    return int(data.ctypes.data)


class NativeObject:
    """Owns an object of the library, from construction to `close`.

    To be used by one thread at a time. What it was made from must outlive it.
    """

    def __init__(self, library: Library, handle: int | None, free: Callable[[int], None]) -> None:
        self.library = library
        self._handle = handle
        self._free = free

    @property
    def handle(self) -> int:
        """As the library knows it.

        Raises:
          ValueError: it is closed.
        """
        if self._handle is None:
            msg = f"this {type(self).__name__} is closed"
            raise ValueError(msg)
        return self._handle

    def close(self) -> None:
        """Give back what it holds. Once closed it stays closed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._free(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            text = f"a {type(self).__name__} was not closed"
            warnings.warn(text, ResourceWarning, stacklevel=1, source=self)
            self.close()
