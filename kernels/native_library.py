"""Finds the CPU engine's libraries and loads them, one for each tier of processors (`cpu/README.md`)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

import attrs

from trioserve_kernels.cpu_tiers import TIERS, processor_flags, runnable_tiers
from trioserve_kernels.native_structures import API_VERSION, FUNCTIONS

__all__ = ["FOLDER_VARIABLE", "Library", "NativeLibraryError", "available_tiers", "load"]

FOLDER_VARIABLE: Final = "TRIOSERVE_CPU_LIBRARIES"
"""The environment variable that names another folder with the libraries, such as a checked build's."""

_BUILD: Final = "`pip install .` (in a source tree: `python setup.py -q build_ext --inplace`) builds it"


class NativeLibraryError(Exception):
    """A tier cannot be used here. The text says why, and what helps."""


@attrs.frozen(eq=False)
class Library:
    """A tier's library, ready to be called. It is never unloaded."""

    tier: str
    path: Path
    functions: ctypes.CDLL
    """With the types of `FUNCTIONS`; a call lets other Python threads run."""


def available_tiers() -> tuple[str, ...]:
    """The tiers that were built and that this machine can run, the fastest first."""
    return tuple(tier for tier in TIERS if not isinstance(_try(tier), NativeLibraryError))


def load(tier: str) -> Library:
    """The library of a tier.

    Raises:
      ValueError: there is no such tier.
      NativeLibraryError: it was not built, is out of date, or this machine cannot run it.
    """
    if tier not in TIERS:
        msg = f"tier is {tier!r}; it must be one of {', '.join(TIERS)}"
        raise ValueError(msg)
    if tier not in runnable_tiers(flags := processor_flags()):
        lacking = ", ".join(sorted(TIERS[tier] - flags))
        raise NativeLibraryError(f"this processor cannot run the {tier} kernels: it lacks {lacking}")
    path = Path(os.environ.get(FOLDER_VARIABLE) or Path(__file__).parent) / f"_cpu_{tier}.so"
    if not path.exists():
        raise NativeLibraryError(f"{path} is not there: {_BUILD}, if there is a C++ compiler")
    library = Library(tier, path, _open(path))
    if error := library.functions.ts_start():
        raise NativeLibraryError(f"Linux does not let the {tier} kernels run: {os.strerror(error)}")
    return library


def _try(tier: str) -> Library | NativeLibraryError:
    try:
        return load(tier)
    except NativeLibraryError as error:
        return error


def _open(path: Path) -> ctypes.CDLL:
    try:
        functions = ctypes.CDLL(str(path))
        found = functions.ts_api_version()
        if found != API_VERSION:
            raise NativeLibraryError(
                f"{path} has version {found} of the interface, {API_VERSION} is needed: {_BUILD} anew"
            )
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NativeLibraryError(f"{path} cannot be used ({error}): {_BUILD} anew") from error
    return functions
