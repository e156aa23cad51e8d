"""How many KV blocks there are: from a given size, from the machine's memory, from a container's limit."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from helpers_worker import engine_config, resolved
from trioserve.errors import InvalidConfigError
from trioserve.worker.kv_layout import KVCacheLayout
from trioserve.worker.memory import available_memory, num_kv_blocks

MIB = 2**20


def _blocks(
    monkeypatch: pytest.MonkeyPatch,
    *,
    available: int,
    bytes_per_block: int = MIB,
    max_model_len: int = 128,
    windows: tuple[int | None, ...] = (None,),
    num_engines: int = 1,
    **args: object,
) -> int:
    monkeypatch.setattr("trioserve.worker.memory.available_memory", lambda: available)
    model = resolved(Path("anywhere"), max_model_len=max_model_len)
    layout = KVCacheLayout(block_size=16, windows=windows)
    config = engine_config(block_size=16, **args)
    config = attrs.evolve(config, cache=attrs.evolve(config.cache, num_engines=num_engines))
    return num_kv_blocks(layout, bytes_per_block, config, model)


def test_a_given_size_is_used_in_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _blocks(monkeypatch, available=0, kv_cache_memory=9 * MIB + 5) == 9


def test_automatic_is_a_quarter_of_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _blocks(monkeypatch, available=400 * MIB, max_num_seqs=256) == 100


def test_engines_side_by_side_share_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _blocks(monkeypatch, available=400 * MIB, max_num_seqs=256, num_engines=4) == 25
    given = _blocks(monkeypatch, available=0, kv_cache_memory=9 * MIB, num_engines=4)
    assert given == 9, "each has what it was given"


def test_automatic_is_no_more_than_all_sequences_can_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _blocks(monkeypatch, available=10**12, max_num_seqs=3) == 3 * 8


def test_automatic_is_at_least_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _blocks(monkeypatch, available=9 * MIB, max_num_seqs=3) == 8


@pytest.mark.parametrize("given", [{"kv_cache_memory": 7 * MIB}, {}], ids=["given", "automatic"])
def test_too_little_says_what_would_do(monkeypatch: pytest.MonkeyPatch, given: dict[str, int]) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        _blocks(monkeypatch, available=7 * MIB, max_model_len=127, **given)
    assert caught.value.field == "kv_cache_memory"
    assert str(8 * MIB) in str(caught.value)
    longest = 7 * 16
    assert f"max_model_len to {longest}" in str(caught.value)
    assert _blocks(monkeypatch, available=7 * MIB, max_model_len=longest, **given) == 7


def test_windows_need_less_than_the_whole_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: dict[str, object] = {
        "windows": (None, 32, 32),
        "max_model_len": 1024,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 1,
    }
    # 64 blocks of 1,024 tokens; twice, the 95 tokens that a step may touch, and one that is cut.
    assert _blocks(monkeypatch, available=10**12, **windows) == 64 + 2 * 7
    with pytest.raises(InvalidConfigError, match="max_model_len to 512 or less"):
        _blocks(monkeypatch, available=(32 + 14) * MIB, **windows)
    assert _blocks(monkeypatch, available=(32 + 14) * MIB, **windows | {"max_model_len": 512}) == 46


def test_no_length_is_proposed_if_none_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        _blocks(monkeypatch, available=MIB, windows=(None, 32))
    assert "or max_model_len" not in str(caught.value)


def _machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    contents = {
        "proc/meminfo": "MemTotal:  9000000 kB\nMemAvailable:  5000000 kB\n",
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_no_limit_leaves_the_machines_memory(tmp_path: Path) -> None:
    files = {"user/memory.max": "max\n", "user/memory.current": "12\n"}
    assert available_memory(_machine(tmp_path, "0::/user\n", files)) == 5_000_000 * 1024


def test_a_limit_above_counts_with_its_use_but_not_with_page_cache(tmp_path: Path) -> None:
    files = {
        "pod/memory.max": "1000000\n",
        "pod/memory.current": "700000\n",
        "pod/memory.stat": "anon 1\ninactive_file 200000\n",
        "pod/app/memory.max": "max\n",
        "pod/app/memory.current": "5\n",
    }
    assert available_memory(_machine(tmp_path, "0::/pod/app\n", files)) == 500_000


def test_version_1_cgroups(tmp_path: Path) -> None:
    files = {
        "memory/pod/memory.limit_in_bytes": "1000000\n",
        "memory/pod/memory.usage_in_bytes": "100000\n",
        "memory/pod/memory.stat": "total_inactive_file 50000\n",
    }
    root = _machine(tmp_path, "5:cpu:/\n4:memory:/pod\n0::/\n", files)
    assert available_memory(root) == 950_000


def test_inside_a_container_its_root_is_the_limit(tmp_path: Path) -> None:
    files = {"memory.max": "3000\n", "memory.current": "1000\n"}
    assert available_memory(_machine(tmp_path, "0::/not/visible/here\n", files)) == 2000
