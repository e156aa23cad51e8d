"""What a measurement was taken on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

__all__ = ["describe_machine", "git_commit"]

_FEATURES = {"avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"}


def describe_machine() -> dict[str, object]:
    cpu = Path("/proc/cpuinfo").read_text()
    memory = Path("/proc/meminfo").read_text()
    return {
        "cpu": _found(r"^model name\s*: (.*)$", cpu),
        "cpu_family": _found(r"^cpu family\s*: (.*)$", cpu),
        "cpu_model": _found(r"^model\s*: (.*)$", cpu),
        "cpus": len(os.sched_getaffinity(0)),
        "features": sorted(_FEATURES & set(_found(r"^flags\s*: (.*)$", cpu).split())),
        "memory_gib": round(int(_found(r"^MemTotal:\s+(\d+) kB", memory) or 0) / 2**20, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def git_commit() -> str:
    """Of this repository; with "+" if files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""
