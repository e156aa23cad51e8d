"""Which executor a model gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.errors import InvalidConfigError
from trioserve.worker.native_executor import NativeExecutor
from trioserve_kernels.native import TIERS, NativeLibraryError, available_tiers, load

if TYPE_CHECKING:
    from trioserve.config import EngineConfig, ResolvedModel
    from trioserve.worker.executor import Executor
    from trioserve_kernels.native import Library

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
    library = _choose(config)
    if isinstance(library, str):
        _check_torch_can(model, config, reason=library)
        # With torch, which takes seconds.
        from trioserve.worker.torch_executor import TorchExecutor  # noqa: PLC0415

        return TorchExecutor(model, config, reason=library)
    return NativeExecutor(library, model, config)


def _choose(config: EngineConfig) -> Library | str:
    """Native kernels, or why there are none."""
    asked = config.cpu_kernels
    if asked == "torch":
        return "cpu_kernels=torch"
    if (obstacle := _obstacle(config)) is not None:
        if asked != "auto":
            raise InvalidConfigError(f"cpu_kernels={asked}: {obstacle}.", field="cpu_kernels")
        return obstacle
    return _fastest() if asked == "auto" else _named(asked)


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
