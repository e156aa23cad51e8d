"""Which executor a model gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.errors import InvalidConfigError
from trioserve.models.registry import SPEECH
from trioserve.worker.native_executor import NativeExecutor
from trioserve.worker.tiers import choose_library

if TYPE_CHECKING:
    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.worker.executor import Executor

__all__ = ["make_executor"]

_PAGE_TOKENS = 16
"""The native cache is made of pages of so many tokens."""


def make_executor(model: ResolvedModel, config: EngineConfig) -> Executor:
    """What `config.cpu_kernels` asks for. auto is the fastest native kernels that there are; where there are
    none, or they cannot do what is asked for, it is torch, and `Executor.kernels` says why.

    Raises:
      ModelNotSupportedError, ModelSourceError: see the executors.
      InvalidConfigError: kernels are asked for that are not there, or that cannot do what else is asked for.
    """
    if model.architecture in SPEECH:
        return _make_hearing(model, config)
    library = choose_library(config.cpu_kernels, _obstacle(config))
    if isinstance(library, str):
        _check_torch_can(model, config, reason=library)
        # With torch, which takes seconds.
        from trioserve.worker.torch_executor import TorchExecutor  # noqa: PLC0415

        return TorchExecutor(model, config, reason=library)
    return NativeExecutor(library, model, config)


def _make_hearing(model: ResolvedModel, config: EngineConfig) -> Executor:
    if config.lora is not None:
        raise InvalidConfigError(
            f"enable_lora must be false for {model.architecture}, which takes no adapters.",
            field="enable_lora",
        )
    library = choose_library(config.cpu_kernels)
    _check_torch_can(model, config, reason="a part of each speech model")
    from trioserve.worker.whisper_executor import WhisperExecutor  # noqa: PLC0415 - with torch, as above

    return WhisperExecutor(model, config, library)


def _obstacle(config: EngineConfig) -> str | None:
    """What the native kernels cannot do."""
    if config.lora is not None:
        return "the native kernels take no adapters (enable_lora)"
    if config.cache.block_size % _PAGE_TOKENS:
        return (
            f"the native kernels need a block_size that is a multiple of {_PAGE_TOKENS}, "
            f"got {config.cache.block_size}"
        )
    return None


def _check_torch_can(model: ResolvedModel, config: EngineConfig, *, reason: str) -> None:
    if config.cache.dtype != "auto":
        raise InvalidConfigError(
            f"kv_cache_dtype must be auto where torch computes ({reason}), got {config.cache.dtype!r}.",
            field="kv_cache_dtype",
        )
    if model.quantization in {"int8", "int4"}:
        raise InvalidConfigError(
            f"quantization must be auto or none where torch computes ({reason}), got {model.quantization!r}.",
            field="quantization",
        )
