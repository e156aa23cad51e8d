"""Memory for native code: what the system gives of it, and when."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path

import pytest

from trioserve.worker.native_buffers import mapped_zeros, populate

MIB = 2**20


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def release() -> tuple[int, int]:
    major, minor, *_ = platform.release().split(".")
    return int(major), int(minor)


def test_a_mapping_takes_no_memory_before_it_is_used() -> None:
    before = resident()
    memory = mapped_zeros(64 * MIB)
    assert resident() - before < 8 * MIB
    memory[::4096] = 1
    assert resident() - before > 56 * MIB


@pytest.mark.skipif(release() < (5, 14), reason="older systems know no populating")
def test_populating_takes_the_memory_and_changes_nothing_in_it() -> None:
    memory = mapped_zeros(64 * MIB)
    memory[40 * MIB : 40 * MIB + 3] = 1, 2, 3
    before = resident()
    populate(memory[32 * MIB + 5 :])
    assert 24 * MIB < resident() - before < 40 * MIB
    assert memory[40 * MIB : 40 * MIB + 3].tolist() == [1, 2, 3]
    assert memory[32 * MIB : 40 * MIB].max() == 0
