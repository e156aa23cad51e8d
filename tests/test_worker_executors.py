"""Which executor a model gets, what is said of it, and what cannot be had."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

from helpers_native import TIERS
from helpers_worker import engine_config, resolved, tiny_llama
from trioserve.errors import InvalidConfigError
from trioserve.worker.executors import make_executor
from trioserve.worker.native_executor import NativeExecutor
from trioserve.worker.torch_executor import TorchExecutor
from trioserve_kernels.native import FOLDER_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

    from trioserve.worker.executor import Executor

needs_native = pytest.mark.skipif(not TIERS, reason="no native kernels were built")

pytestmark = pytest.mark.usefixtures("same_number_of_threads")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(directory)
    return directory


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))


def _make(directory: Path, *, quantization: Any = "auto", **args: Any) -> Executor:
    model = attrs.evolve(resolved(directory, dtype="bfloat16"), quantization=quantization)
    return make_executor(model, engine_config(**{"block_size": 16} | args))


@needs_native
def test_automatic_is_the_fastest_tier_and_torch_keeps_out_of_its_way(directory: Path) -> None:
    torch.set_num_threads(2)
    with closing(_make(directory, threads=2)) as executor:
        assert isinstance(executor, NativeExecutor)
        assert torch.get_num_threads() == 1
        assert executor.kernels == f"{TIERS[0]} kernels in 2 threads"


@pytest.mark.parametrize("tier", TIERS)
def test_a_tier_by_its_name(directory: Path, tier: str) -> None:
    with closing(_make(directory, cpu_kernels=tier)) as executor:
        assert isinstance(executor, NativeExecutor)
        assert executor.kernels == f"{tier} kernels in 1 thread"


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"cpu_kernels": "torch"}, "cpu_kernels=torch"),
        ({"block_size": 8}, "block_size that is a multiple of 16, got 8"),
        ({"enable_lora": True}, "enable_lora"),
    ],
)
def test_torch_computes_what_others_cannot(directory: Path, args: dict[str, Any], reason: str) -> None:
    with closing(_make(directory, **args)) as executor:
        assert isinstance(executor, TorchExecutor)
        assert executor.kernels.startswith("torch (")
        assert reason in executor.kernels


@pytest.mark.usefixtures("nothing_built")
def test_torch_computes_where_nothing_was_built(directory: Path) -> None:
    with closing(_make(directory)) as executor:
        assert isinstance(executor, TorchExecutor)
        assert executor.kernels.startswith("torch (there are no native kernels: ")
        assert "is not there" in executor.kernels


@pytest.mark.usefixtures("nothing_built")
def test_a_tier_that_is_not_there(directory: Path) -> None:
    with pytest.raises(
        InvalidConfigError, match=r"one of auto, torch on .*, got 'scalar'.* not there"
    ) as caught:
        _make(directory, cpu_kernels="scalar")
    assert caught.value.field == "cpu_kernels"


@pytest.mark.parametrize("args", [{"block_size": 24}, {"enable_lora": True}])
def test_a_tier_that_cannot_do_what_else_is_asked_for(directory: Path, args: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError, match="cpu_kernels=scalar: the native kernels") as caught:
        _make(directory, cpu_kernels="scalar", **args)
    assert caught.value.field == "cpu_kernels"


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"quantization": "int8"}, "quantization"),
        ({"quantization": "int4"}, "quantization"),
    ],
)
def test_what_torch_cannot_do(directory: Path, args: dict[str, Any], field: str) -> None:
    with pytest.raises(
        InvalidConfigError, match=rf"{field} must be auto.*\(cpu_kernels=torch\), got"
    ) as caught:
        _make(directory, cpu_kernels="torch", **args)
    assert caught.value.field == field
