from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_MIB = 2**20
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_PROGRAM = """
import ctypes, gc, mmap, re
from pathlib import Path
from trioserve.settling import settle

def mapped(used):
    memory = mmap.mmap(-1, 16 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for start in range(0, used, 4096):
        memory[start : start + 8] = b"contents"
    return memory

def in_huge_pages(memory):
    # In KiB, and how many are in use, of the mapping that it is in.
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        start, end = (int(bound, 16) for bound in mapping.split()[0].split("-"))
        if start <= address < end:
            return [int(re.search(field + r": +(\\d+) kB", mapping)[1]) for field in ("AnonHugePages", "Rss")]

keep, sparse = mapped(16 * 2**20), mapped(2**20)
sparse.madvise(mmap.MADV_DONTFORK)  # so that it stays a mapping of its own
settle()
assert keep[::4096] == b"c" * 4096 and keep[4088:4104] == bytes(8) + b"contents"
print(*in_huge_pages(keep), *in_huge_pages(sparse), gc.get_freeze_count())
"""


def _run() -> list[int]:
    result = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    return [int(number) for number in result.stdout.split()]


@pytest.mark.skipif(not _SETTING.exists(), reason="this system has no huge pages")
def test_what_is_in_use_moves_into_huge_pages_unchanged_and_what_is_hardly_used_does_not_grow():
    dense_huge, _, sparse_huge, sparse_resident, num_frozen = _run()
    assert num_frozen > 1000
    assert sparse_resident == 1024
    assert sparse_huge == 0
    if "[never]" not in _SETTING.read_text():
        assert dense_huge * 1024 >= 12 * _MIB


def test_a_system_without_a_list_of_mappings_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from trioserve import settling

    def missing(self: Path) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert settling.gather_in_huge_pages() == 0
