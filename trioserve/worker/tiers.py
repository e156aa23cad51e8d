"""Which native kernels are used, if any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.errors import InvalidConfigError
from trioserve_kernels.native import TIERS, NativeLibraryError, available_tiers, load

if TYPE_CHECKING:
    from trioserve.config import CPUKernels
    from trioserve_kernels.native import Library

__all__ = ["choose_library"]


def choose_library(asked: CPUKernels, obstacle: str | None = None) -> Library | str:
    """Native kernels, or why there are none. obstacle: why they cannot do what else is asked for.

    Raises:
      InvalidConfigError: kernels are asked for that are not there, or that cannot do it.
    """
    if asked == "torch":
        return "cpu_kernels=torch"
    if obstacle is not None:
        if asked != "auto":
            raise InvalidConfigError(f"cpu_kernels={asked}: {obstacle}.", field="cpu_kernels")
        return obstacle
    return _fastest() if asked == "auto" else _named(asked)


def _fastest() -> Library | str:
    reasons = []
    for tier in TIERS:
        try:
            return load(tier)
        except NativeLibraryError as error:
            reasons.append(str(error))
    return f"there are no native kernels: {reasons[-1]}"  # of the tier that every processor can run


def _named(tier: str) -> Library:
    try:
        return load(tier)
    except NativeLibraryError as error:
        allowed = ", ".join(["auto", "torch", *available_tiers()])
        raise InvalidConfigError(
            f"cpu_kernels must be one of {allowed} on this machine, got {tier!r}: {error}.",
            field="cpu_kernels",
        ) from None
