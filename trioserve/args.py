"""The one schema of everything a user can set: fields here are flags, keyword arguments and JSON keys alike.

`EngineArgs` goes to every entry (`AsyncLLM`, `LLM`, `LLMEngine`, the CLI); `trioserve.server_args` adds what
only an HTTP server has. The command line is generated from these classes (`trioserve.cli.flags`), so a flag
cannot differ from the keyword of the same name.
"""

from __future__ import annotations

import os
import warnings
from typing import Any, get_args

import attrs

from trioserve.arg_fields import (
    arg,
    choice,
    fail,
    flag,
    nested,
    number,
    optional_nested,
    quantity,
    seconds,
    text,
    texts,
)
from trioserve.arg_lora import lora_modules
from trioserve.config import (
    AdmissionConfig,
    CacheConfig,
    CPUKernels,
    EngineConfig,
    GenerationDefaults,
    LogConfig,
    LoRAConfig,
    LoRAModule,
    ModelConfig,
    PoolerConfig,
    Quantization,
    ReasoningConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
    SupervisionConfig,
)
from trioserve.reasoning import REASONING_PARSERS
from trioserve.tasks import Convert, Runner

__all__ = ["DEFAULT_MODEL", "RETIRED", "EngineArgs", "drop_retired"]

DEFAULT_MODEL = "smollm2-135m"

RETIRED: dict[str, str] = {
    "swap_space": "preempted requests are computed again, not swapped out",
    "enable_chunked_prefill": "prefill is always chunked",
    "enforce_eager": "there are no CUDA graphs to switch off",
    "use_v2_block_manager": "there is one block manager",
    "disable_log_requests": "requests are not logged unless --log.requests is given",
}
"""Names that people bring from elsewhere or from older versions: accepted with a warning, and dropped."""


def drop_retired(values: dict[str, Any], *, stacklevel: int = 2) -> dict[str, Any]:
    """`values` without the retired names; each of those gives a DeprecationWarning."""
    for name in values.keys() & RETIRED.keys():
        warnings.warn(
            f"{name} is retired and ignored: {RETIRED[name]}.", DeprecationWarning, stacklevel=stacklevel + 1
        )
    return {name: value for name, value in values.items() if name not in RETIRED}


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
        raise fail("dtype", value, "one of auto, bfloat16, float32")
    return _DTYPES[value]


def _check_quantization(args: EngineArgs) -> None:
    if args.quantization in {"int8", "int4"} and args.dtype == "float32":
        raise fail("quantization", args.quantization, "auto or none with dtype float32")


def _check_lora(args: EngineArgs) -> None:
    if args.lora_modules and not args.enable_lora:
        raise fail("lora_modules", [module.name for module in args.lora_modules], "empty without enable_lora")
    if len(args.lora_modules) > args.max_cpu_loras:
        raise fail(
            "lora_modules", len(args.lora_modules), f"at most max_cpu_loras={args.max_cpu_loras} adapters"
        )
    for module in args.lora_modules:
        if module.name in (args.served_model_name or (args.model,)):
            raise fail("lora_modules", module.name, "named otherwise than the model itself")


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


@attrs.frozen(kw_only=True)
class EngineArgs:
    """What an engine is to be. Wrong values raise `InvalidConfigError`, which names the field."""

    model: str = arg(
        "packaged model, Hugging Face directory, .gguf file or hub id", text("model"), default=DEFAULT_MODEL
    )
    served_model_name: tuple[str, ...] = arg(
        "name(s) that clients use; the first is reported [the model's name]",
        texts("served_model_name"),
        default=(),
    )
    tokenizer: str | None = arg(
        "directory or hub id of another tokenizer", text("tokenizer", optional=True), default=None
    )
    runner: str = arg(
        "auto (what the model was made for), generate or pooling",
        choice("runner", ("auto", *get_args(Runner))),
        default="auto",
    )
    convert: str = arg(
        "make a model for generation into one for embed or classify; auto: as its files say",
        choice("convert", get_args(Convert)),
        default="auto",
    )
    pooler_config: PoolerConfig = arg(
        "how hidden states become results, over the model's own way: JSON or by --pooler-config.KEY",
        nested("pooler_config", PoolerConfig),
        factory=PoolerConfig,
    )
    revision: str | None = arg(
        "branch, tag or commit of a hub model", text("revision", optional=True), default=None
    )
    hf_token: str | None = arg(
        "token for gated hub models [the one of `hf auth login`]",
        text("hf_token", optional=True),
        default=None,
        repr=False,
    )
    dtype: str = arg("auto, bfloat16 or float32", _dtype, default="auto")
    quantization: str = arg(
        "weights: auto (as they are stored), none (in dtype), int8 or int4 (quantized as they are loaded)",
        choice("quantization", get_args(Quantization)),
        default="auto",
    )
    seed: int = arg("seed of requests that bring none", quantity("seed", least=0), default=0)
    max_model_len: int | None = arg(
        "prompt and output together, in tokens",
        quantity("max_model_len", least=1, auto=True),
        default=None,
    )
    override_generation_config: GenerationDefaults = arg(
        "sampling defaults, over the model's own: JSON or KEY=VALUE by --override-generation-config.KEY",
        nested("override_generation_config", GenerationDefaults),
        factory=GenerationDefaults,
    )
    block_size: int = arg("tokens per KV block", quantity("block_size", least=1), default=16)
    kv_cache_memory: int | None = arg(
        "bytes for the KV cache, e.g. 2GiB", quantity("kv_cache_memory", least=1, auto=True), default=None
    )
    kv_cache_dtype: str = arg(
        "keys and values in the cache: auto (as the model) or int8",
        choice("kv_cache_dtype", ("auto", "int8")),
        default="auto",
    )
    enable_prefix_caching: bool = arg(
        "share the KV blocks of equal prompt prefixes", flag("enable_prefix_caching"), default=True
    )
    max_num_seqs: int = arg("sequences running at a time", quantity("max_num_seqs", least=1), default=128)
    max_num_batched_tokens: int = arg(
        "tokens computed per step", quantity("max_num_batched_tokens", least=1), default=512
    )
    scheduling_policy: str = arg(
        "who is served first: fcfs, priority (lower first) or deadline (earliest first)",
        choice("scheduling_policy", ("fcfs", "priority", "deadline")),
        default="fcfs",
    )
    long_prefill_token_threshold: int | None = arg(
        "prompt tokens that a long prompt gets of a step it shares [half of max_num_batched_tokens]",
        quantity("long_prefill_token_threshold", least=1, auto=True),
        default=None,
    )
    prefill_beside_decodes: int | None = arg(
        "prompt tokens of a step in which others decode, or an eighth of those that wait, if that is more "
        "[an eighth of max_num_batched_tokens]",
        quantity("prefill_beside_decodes", least=1, auto=True),
        default=None,
    )
    max_long_partial_prefills: int = arg(
        "long prompts under way at a time", quantity("max_long_partial_prefills", least=1), default=1
    )
    async_scheduling: bool = arg(
        "schedule the next step while one runs", flag("async_scheduling"), default=True
    )
    speculative_config: SpeculativeConfig | None = arg(
        'guess several tokens per step: JSON such as {"method": "ngram", "num_speculative_tokens": 5}',
        optional_nested("speculative_config", SpeculativeConfig),
        default=None,
    )
    structured_outputs_config: StructuredOutputsConfig = arg(
        "how grammars are made: JSON or by --structured-outputs-config.KEY",
        nested("structured_outputs_config", StructuredOutputsConfig),
        factory=StructuredOutputsConfig,
    )
    reasoning_config: ReasoningConfig | None = arg(
        'texts between which the model thinks: JSON such as {"start": "<think>", "end": "</think>"}',
        optional_nested("reasoning_config", ReasoningConfig),
        default=None,
    )
    reasoning_parser: str = arg(
        f"how the model thinks: {', '.join(REASONING_PARSERS)}; auto: as its chat template shows, tags: "
        "between the marks of --reasoning-config",
        choice("reasoning_parser", REASONING_PARSERS),
        default="auto",
    )
    max_logprobs: int = arg(
        "logprobs that a request may ask for; -1: as many as it likes",
        quantity("max_logprobs", least=-1),
        default=20,
    )
    logits_processors: tuple[str, ...] = arg(
        "custom logits processors, as module:Class", texts("logits_processors"), default=()
    )
    enable_lora: bool = arg("serve LoRA adapters beside the model", flag("enable_lora"), default=False)
    lora_modules: tuple[LoRAModule, ...] = arg(
        'adapters from the start on: NAME=PATH or JSON such as {"name": "sql", "path": "sql-lora"}',
        lora_modules,
        default=(),
    )
    max_loras: int = arg("different adapters in a step", quantity("max_loras", least=1), default=8)
    max_lora_rank: int = arg("highest rank of an adapter", quantity("max_lora_rank", least=1), default=64)
    max_cpu_loras: int = arg("adapters in memory at a time", quantity("max_cpu_loras", least=1), default=64)
    threads: int | None = arg(
        "compute threads of the engine core [the usable processors]",
        quantity("threads", least=1, auto=True),
        default=None,
    )
    cpu_kernels: str = arg(
        f"what computes: {', '.join(get_args(CPUKernels))}; auto: the best that this processor runs",
        choice("cpu_kernels", get_args(CPUKernels)),
        default="auto",
    )
    engine: str = arg(
        "where the engine core runs: process or inproc",
        choice("engine", ("process", "inproc")),
        default="process",
    )
    max_num_queued_reqs: int | None = arg(
        "sequences that may wait; more are refused [serve: 16 times max_num_seqs, else no limit]",
        quantity("max_num_queued_reqs", least=0, auto=True),
        default=None,
    )
    max_num_queued_tokens: int | None = arg(
        "prompt tokens that may wait; more are refused [no limit]",
        quantity("max_num_queued_tokens", least=1, auto=True),
        default=None,
    )
    engine_restart: str = arg(
        "what follows the engine core's death: never (all ends) or on-failure (a new one)",
        choice("engine_restart", ("never", "on-failure")),
        default="never",
    )
    engine_restart_limit: int = arg(
        "restarts in a row before it counts as dead", quantity("engine_restart_limit", least=1), default=5
    )
    engine_restart_backoff: float = arg(
        "seconds before the first restart; doubled for each further one in a row",
        seconds("engine_restart_backoff"),
        default=1.0,
    )
    requeue_on_restart: bool = arg(
        "give requests that had no token yet to the new engine core (once), instead of failing them",
        flag("requeue_on_restart"),
        default=False,
    )
    step_timeout: float = arg(
        "seconds after which an engine core that is stuck counts as dead",
        number("step_timeout", allowed="a number of seconds > 0", accepts=lambda v: v > 0),
        default=300.0,
    )
    startup_timeout: float = arg(
        "seconds until the engine core must be ready", seconds("startup_timeout"), default=600.0
    )
    log: LogConfig = arg("what is logged: JSON or by --log.KEY", nested("log", LogConfig), factory=LogConfig)

    def __attrs_post_init__(self) -> None:
        _check_lora(self)
        _check_quantization(self)

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
                quantization=self.quantization,  # type: ignore[arg-type]  # likewise
                max_model_len=self.max_model_len,
                seed=self.seed,
                generation=self.override_generation_config,
                runner=self.runner,  # type: ignore[arg-type]  # its converter lets only these through
                convert=self.convert,  # type: ignore[arg-type]  # likewise
                pooler=self.pooler_config,
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                memory_bytes=self.kv_cache_memory,
                enable_prefix_caching=self.enable_prefix_caching,
                dtype=self.kv_cache_dtype,  # type: ignore[arg-type]  # its converter lets only these through
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=min(self.max_num_seqs, self.max_num_batched_tokens),
                max_num_batched_tokens=self.max_num_batched_tokens,
                policy=self.scheduling_policy,  # type: ignore[arg-type]  # its converter lets only these through
                long_prefill_token_threshold=self.long_prefill_token_threshold
                or -(-self.max_num_batched_tokens // 2),
                prefill_beside_decodes=self.prefill_beside_decodes or -(-self.max_num_batched_tokens // 8),
                max_long_partial_prefills=self.max_long_partial_prefills,
                plan_ahead=self.async_scheduling,
                max_loras=self.max_loras if self.enable_lora else None,
            ),
            speculative=self.speculative_config,
            structured_outputs=self.structured_outputs_config,
            reasoning=self.reasoning_config,
            reasoning_parser=self.reasoning_parser,
            max_logprobs=self.max_logprobs,
            logits_processors=self.logits_processors,
            threads=self.threads or _usable_cpus(),
            cpu_kernels=self.cpu_kernels,  # type: ignore[arg-type]  # its converter lets only these through
            engine=self.engine,  # type: ignore[arg-type]  # its converter lets only these through
            admission=AdmissionConfig(
                max_num_queued_reqs=self.max_num_queued_reqs,
                max_num_queued_tokens=self.max_num_queued_tokens,
            ),
            supervision=SupervisionConfig(
                restart=self.engine_restart,  # type: ignore[arg-type]  # its converter lets only these through
                restart_limit=self.engine_restart_limit,
                restart_backoff=self.engine_restart_backoff,
                requeue=self.requeue_on_restart,
                step_timeout=self.step_timeout,
            ),
            startup_timeout=self.startup_timeout,
            log=self.log,
            lora=self._lora_config() if self.enable_lora else None,
        )

    def _lora_config(self) -> LoRAConfig:
        return LoRAConfig(
            modules=self.lora_modules, max_loaded=self.max_cpu_loras, max_rank=self.max_lora_rank
        )
