"""The tiers of processors that the CPU engine is built for, and which of them this machine can run."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["TIERS", "processor_flags", "runnable_tiers"]

_AVX2: Final = frozenset({"avx2", "fma", "f16c"})
_AVX512: Final = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
_AVX512_BF16: Final = _AVX512 | {"avx512_bf16"}
_AMX: Final = _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}

TIERS: Final = {
    "amx": _AMX,
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "scalar": frozenset[str](),
}
"""What a processor must have for each tier, in the words of /proc/cpuinfo; the fastest tier first."""


def processor_flags() -> frozenset[str]:
    """What Linux says that all of this machine's processors have; empty where it does not say."""
    if platform.machine() not in {"x86_64", "AMD64"}:
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = [frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")]
    return frozenset.intersection(*flags) if flags else frozenset()


def runnable_tiers(flags: Iterable[str]) -> tuple[str, ...]:
    """The tiers that a processor with these flags can run, the fastest first."""
    return tuple(tier for tier, needed in TIERS.items() if needed <= set(flags))
