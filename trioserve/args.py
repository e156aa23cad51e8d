"""The one schema of everything a user can set: fields here are flags, keyword arguments and JSON keys alike.

`EngineArgs` goes to every entry (`AsyncLLM`, `LLM`, `LLMEngine`, the CLI); `ServerArgs` adds what only an
HTTP server has. The command line is generated from these classes (`trioserve.cli.flags`), so a flag cannot
differ from the keyword of the same name.
"""

from __future__ import annotations

import json
import os
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from trioserve.config import (
    CacheConfig,
    EngineConfig,
    GenerationDefaults,
    LogConfig,
    ModelConfig,
    ReasoningConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
)
from trioserve.errors import InvalidConfigError
from trioserve.quantities import parse_quantity
from trioserve.structuring import find_problems, make_converter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["DEFAULT_MODEL", "RETIRED", "EngineArgs", "ServerArgs", "drop_retired"]

T = TypeVar("T")

DEFAULT_MODEL = "smollm2-135m"

RETIRED: dict[str, str] = {
    "swap_space": "preempted requests are computed again, not swapped out",
    "enable_chunked_prefill": "prefill is always chunked",
    "enforce_eager": "there are no CUDA graphs to switch off",
    "use_v2_block_manager": "there is one block manager",
    "disable_log_requests": "requests are not logged unless --log.requests is given",
}
"""Names that people bring from elsewhere or from older versions: accepted with a warning, and dropped."""

_nested_converter = make_converter(forbid_extra_keys=True)


def drop_retired(values: dict[str, Any], *, stacklevel: int = 2) -> dict[str, Any]:
    """`values` without the retired names; each of those gives a DeprecationWarning."""
    for name in values.keys() & RETIRED.keys():
        warnings.warn(
            f"{name} is retired and ignored: {RETIRED[name]}.", DeprecationWarning, stacklevel=stacklevel + 1
        )
    return {name: value for name, value in values.items() if name not in RETIRED}


def _fail(field: str, value: object, allowed: str) -> InvalidConfigError:
    return InvalidConfigError(f"{field} must be {allowed}, got {value!r}.", field=field)


# Converters: each takes what Python, JSON or a command line gives, and raises InvalidConfigError.


def _quantity(field: str, *, least: int, auto: bool = False) -> Callable[[Any], int | None]:
    allowed = f"an integer >= {least} (8k and 2GiB are understood)" + (", or 'auto'" if auto else "")

    def convert(value: Any) -> int | None:
        if auto and value in {None, "auto"}:
            return None
        try:
            number = parse_quantity(value)
        except ValueError:
            raise _fail(field, value, allowed) from None
        if number < least:
            raise _fail(field, value, allowed)
        return number

    return convert


def _number(field: str, *, allowed: str, accepts: Callable[[float], bool]) -> Callable[[Any], float]:
    def convert(value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise _fail(field, value, allowed) from None
        if isinstance(value, bool) or not accepts(number):
            raise _fail(field, value, allowed)
        return number

    return convert


def _seconds(field: str) -> Callable[[Any], float]:
    return _number(field, allowed="a number of seconds >= 0", accepts=lambda v: v >= 0)


def _choice(field: str, choices: tuple[str, ...]) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if value not in choices:
            raise _fail(field, value, "one of " + ", ".join(choices))
        return str(value)

    return convert


def _flag(field: str) -> Callable[[Any], bool]:
    def convert(value: Any) -> bool:
        if not isinstance(value, bool):
            raise _fail(field, value, "true or false")
        return value

    return convert


def _text(field: str, *, optional: bool = False) -> Callable[[Any], str | None]:
    def convert(value: Any) -> str | None:
        if value is None and optional:
            return None
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(text, str) or not text:
            raise _fail(field, value, "a non-empty string")
        return text

    return convert


def _texts(field: str) -> Callable[[Any], tuple[str, ...]]:
    def convert(value: str | Iterable[str] | None) -> tuple[str, ...]:
        if value is None:
            return ()
        texts = (value,) if isinstance(value, str) else tuple(value)
        if not all(isinstance(text, str) and text for text in texts):
            raise _fail(field, value, "a non-empty string or a list of them")
        return texts

    return convert


def _nested(field: str, kind: type[T]) -> Callable[[Any], T]:
    """An object of `kind`, a dict of its fields, or JSON of one."""

    def convert(value: Any) -> T:
        if isinstance(value, kind):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise _fail(field, value, "a JSON object") from None
        try:
            return _nested_converter.structure(value, kind)
        except Exception as error:
            problem = find_problems(error, field)[0]
            raise InvalidConfigError(f"{problem.path} {problem.message}.", field=problem.path) from None

    return convert


def _optional_nested(field: str, kind: type[T]) -> Callable[[Any], T | None]:
    convert = _nested(field, kind)
    return lambda value: None if value is None else convert(value)


def _arg(help: str, convert: Callable[[Any], Any], **kwargs: Any) -> Any:  # noqa: A002 - attrs' word for it
    return attrs.field(converter=convert, metadata={"help": help}, **kwargs)


_DTYPES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float32": "float32",
    "float": "float32",
    "fp32": "float32",
}


def _dtype(value: Any) -> str:
    if not isinstance(value, str) or value not in _DTYPES:
        raise _fail("dtype", value, "one of auto, bfloat16, float32")
    return _DTYPES[value]


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


@attrs.frozen(kw_only=True)
class EngineArgs:
    """What an engine is to be. Wrong values raise `InvalidConfigError`, which names the field."""

    model: str = _arg(
        "packaged model, Hugging Face directory, .gguf file or hub id", _text("model"), default=DEFAULT_MODEL
    )
    served_model_name: tuple[str, ...] = _arg(
        "name(s) that clients use; the first is reported [the model's name]",
        _texts("served_model_name"),
        default=(),
    )
    tokenizer: str | None = _arg(
        "directory or hub id of another tokenizer", _text("tokenizer", optional=True), default=None
    )
    revision: str | None = _arg(
        "branch, tag or commit of a hub model", _text("revision", optional=True), default=None
    )
    hf_token: str | None = _arg(
        "token for gated hub models [the one of `hf auth login`]",
        _text("hf_token", optional=True),
        default=None,
        repr=False,
    )
    dtype: str = _arg("auto, bfloat16 or float32", _dtype, default="auto")
    seed: int = _arg("seed of requests that bring none", _quantity("seed", least=0), default=0)
    max_model_len: int | None = _arg(
        "prompt and output together, in tokens",
        _quantity("max_model_len", least=1, auto=True),
        default=None,
    )
    override_generation_config: GenerationDefaults = _arg(
        "sampling defaults, over the model's own: JSON or KEY=VALUE by --override-generation-config.KEY",
        _nested("override_generation_config", GenerationDefaults),
        factory=GenerationDefaults,
    )
    block_size: int = _arg("tokens per KV block", _quantity("block_size", least=1), default=16)
    kv_cache_memory: int | None = _arg(
        "bytes for the KV cache, e.g. 2GiB", _quantity("kv_cache_memory", least=1, auto=True), default=None
    )
    enable_prefix_caching: bool = _arg(
        "share the KV blocks of equal prompt prefixes", _flag("enable_prefix_caching"), default=True
    )
    max_num_seqs: int = _arg("sequences running at a time", _quantity("max_num_seqs", least=1), default=128)
    max_num_batched_tokens: int = _arg(
        "tokens computed per step", _quantity("max_num_batched_tokens", least=1), default=512
    )
    scheduling_policy: str = _arg(
        "who is served first: fcfs, priority (lower first) or deadline (earliest first)",
        _choice("scheduling_policy", ("fcfs", "priority", "deadline")),
        default="fcfs",
    )
    long_prefill_token_threshold: int | None = _arg(
        "prompt tokens that a long prompt gets of a step it shares [half of max_num_batched_tokens]",
        _quantity("long_prefill_token_threshold", least=1, auto=True),
        default=None,
    )
    max_long_partial_prefills: int = _arg(
        "long prompts under way at a time", _quantity("max_long_partial_prefills", least=1), default=1
    )
    async_scheduling: bool = _arg(
        "schedule the next step while one runs", _flag("async_scheduling"), default=True
    )
    speculative_config: SpeculativeConfig | None = _arg(
        'guess several tokens per step: JSON such as {"method": "ngram", "num_speculative_tokens": 5}',
        _optional_nested("speculative_config", SpeculativeConfig),
        default=None,
    )
    structured_outputs_config: StructuredOutputsConfig = _arg(
        "how grammars are made: JSON or by --structured-outputs-config.KEY",
        _nested("structured_outputs_config", StructuredOutputsConfig),
        factory=StructuredOutputsConfig,
    )
    reasoning_config: ReasoningConfig | None = _arg(
        'texts between which the model thinks: JSON such as {"start": "<think>", "end": "</think>"}',
        _optional_nested("reasoning_config", ReasoningConfig),
        default=None,
    )
    max_logprobs: int = _arg(
        "logprobs that a request may ask for; -1: as many as it likes",
        _quantity("max_logprobs", least=-1),
        default=20,
    )
    logits_processors: tuple[str, ...] = _arg(
        "custom logits processors, as module:Class", _texts("logits_processors"), default=()
    )
    threads: int | None = _arg(
        "compute threads of the engine core [the usable processors]",
        _quantity("threads", least=1, auto=True),
        default=None,
    )
    engine: str = _arg(
        "where the engine core runs: process or inproc",
        _choice("engine", ("process", "inproc")),
        default="process",
    )
    startup_timeout: float = _arg(
        "seconds until the engine core must be ready", _seconds("startup_timeout"), default=600.0
    )
    log: LogConfig = _arg(
        "what is logged: JSON or by --log.KEY", _nested("log", LogConfig), factory=LogConfig
    )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineArgs:
        """From keyword arguments.

        Raises:
          TypeError: a name is unknown.
          InvalidConfigError: a value is wrong.
        """
        values = drop_retired(values, stacklevel=3)
        known = {attribute.name for attribute in attrs.fields(cls)}
        for name in values:
            if name not in known:
                raise TypeError(f"unknown argument {name!r}; known are: {', '.join(sorted(known))}")
        return cls(**values)

    def create_engine_config(self) -> EngineConfig:
        """The frozen configuration. Touches neither disk nor network."""
        return EngineConfig(
            model=ModelConfig(
                model=self.model,
                tokenizer=self.tokenizer,
                revision=self.revision,
                hf_token=self.hf_token,
                served_model_names=self.served_model_name or (self.model,),
                dtype=self.dtype,  # type: ignore[arg-type]  # its converter lets only these through
                max_model_len=self.max_model_len,
                seed=self.seed,
                generation=self.override_generation_config,
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                memory_bytes=self.kv_cache_memory,
                enable_prefix_caching=self.enable_prefix_caching,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=min(self.max_num_seqs, self.max_num_batched_tokens),
                max_num_batched_tokens=self.max_num_batched_tokens,
                policy=self.scheduling_policy,  # type: ignore[arg-type]  # its converter lets only these through
                long_prefill_token_threshold=self.long_prefill_token_threshold
                or -(-self.max_num_batched_tokens // 2),
                max_long_partial_prefills=self.max_long_partial_prefills,
                plan_ahead=self.async_scheduling,
            ),
            speculative=self.speculative_config,
            structured_outputs=self.structured_outputs_config,
            reasoning=self.reasoning_config,
            max_logprobs=self.max_logprobs,
            logits_processors=self.logits_processors,
            threads=self.threads or _usable_cpus(),
            engine=self.engine,  # type: ignore[arg-type]  # its converter lets only these through
            startup_timeout=self.startup_timeout,
            log=self.log,
        )


def _port(value: Any) -> int:
    try:
        port = int(value)
    except (TypeError, ValueError):
        raise _fail("port", value, "an integer from 0 to 65535") from None
    if isinstance(value, bool) or not 0 <= port <= 65535:
        raise _fail("port", value, "an integer from 0 to 65535")
    return port


@attrs.frozen(kw_only=True)
class ServerArgs:
    """What the HTTP server is to be."""

    host: str = _arg("address to listen on", _text("host"), default="127.0.0.1")
    port: int = _arg("port to listen on; 0 takes a free one", _port, default=8000)
    uds: str | None = _arg(
        "Unix socket to listen on, instead of host and port", _text("uds", optional=True), default=None
    )
    api_key: tuple[str, ...] = _arg(
        "key(s) that clients must send as a bearer token [$TRIOSERVE_API_KEY]",
        _texts("api_key"),
        default=(),
        repr=False,
    )
    shutdown_timeout: float = _arg(
        "seconds that running requests have to finish after SIGTERM",
        _seconds("shutdown_timeout"),
        default=30.0,
    )
    keep_alive_timeout: float = _arg(
        "seconds an idle connection stays open", _seconds("keep_alive_timeout"), default=5.0
    )
    write_timeout: float = _arg(
        "seconds without progress after which a client that does not read is dropped",
        _seconds("write_timeout"),
        default=30.0,
    )
    max_body_size: int = _arg(
        "bytes of a request body", _quantity("max_body_size", least=1), default=16 * 2**20
    )
