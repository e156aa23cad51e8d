"""How many blocks the KV cache gets. Imports no torch."""

from __future__ import annotations

import bisect
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trioserve.errors import InvalidConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.worker.kv_layout import KVCacheLayout

__all__ = ["available_memory", "num_kv_blocks"]

_AUTOMATIC_SHARE = 4
"""The automatic size is the available memory divided by this: others live on the machine too."""


def num_kv_blocks(
    layout: KVCacheLayout, bytes_per_block: int, config: EngineConfig, model: ResolvedModel
) -> int:
    """As many as `config.cache.memory_bytes` holds; if that is None, as many as the machine can well spare.

    The automatic size is a quarter of the available memory, or its part of that if several engines start side
    by side, at most what `max_num_seqs` sequences of
    `max_model_len` fill, and at least one such sequence.

    Raises:
      InvalidConfigError: one sequence of `max_model_len` would not fit.
    """
    per_sequence = layout.max_blocks(model.max_model_len, config.scheduler.max_num_batched_tokens)
    if config.cache.memory_bytes is None:
        memory = available_memory()
        useful = config.scheduler.max_num_seqs * per_sequence
        share = memory // _AUTOMATIC_SHARE // config.cache.num_engines
        wanted = min(max(share // bytes_per_block, per_sequence), useful)
    else:
        memory = config.cache.memory_bytes
        wanted = memory // bytes_per_block
    if min(wanted, memory // bytes_per_block) < per_sequence:
        given = "kv_cache_memory is" if config.cache.memory_bytes is not None else "the memory available is"
        needed = per_sequence * bytes_per_block
        raise InvalidConfigError(
            f"One sequence of max_model_len={model.max_model_len} needs {_mib(needed)} of KV cache, and "
            f"{given} {_mib(memory)}: set kv_cache_memory to {needed} or more"
            f"{_shorter(layout, memory // bytes_per_block, config, model)}.",
            field="kv_cache_memory",
        )
    return wanted


def _shorter(layout: KVCacheLayout, num_blocks: int, config: EngineConfig, model: ResolvedModel) -> str:
    """The other way out: sequences that fit into so many blocks, if there are any."""

    def needed(length: int) -> int:
        return layout.max_blocks(length, config.scheduler.max_num_batched_tokens)

    longest = bisect.bisect_right(range(1, model.max_model_len), num_blocks, key=needed)
    return f", or max_model_len to {longest} or less" if longest else ""


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping: of the machine, or of this process's cgroups if that is less.

    Args:
      root: where /proc and /sys are.
    """
    return min([_machine_available(root), *_cgroup_available(root)])


def _machine_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable; set kv_cache_memory")


def _cgroup_available(root: Path) -> Iterator[int]:
    """What each cgroup above this process still allows; page cache that can be dropped counts as free."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = _CgroupFiles(root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = _CgroupFiles(
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        yield from _levels_available(files, path.strip("/"))


class _CgroupFiles(NamedTuple):
    mount: Path
    limit: str
    usage: str
    droppable: str
    """The line of memory.stat."""


def _levels_available(files: _CgroupFiles, path: str) -> Iterator[int]:
    """Of the cgroup `path` and all above it. Inside a container the path may not exist, its root does."""
    directory = files.mount / path
    while True:
        limit = "".join(_lines(directory / files.limit))
        usage = "".join(_lines(directory / files.usage))
        if limit.isdigit() and usage.isdigit():
            yield max(0, int(limit) - int(usage) + _droppable(directory, files.droppable))
        if directory == files.mount:
            return
        directory = directory.parent


def _droppable(directory: Path, key: str) -> int:
    for line in _lines(directory / "memory.stat"):
        name, _, amount = line.partition(" ")
        if name == key:
            return int(amount)
    return 0


def _lines(path: Path) -> list[str]:
    """Empty if there is no such file: cgroups may not be mounted, and the root has no limit."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
