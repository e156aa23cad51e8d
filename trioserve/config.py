"""What an engine was asked to be: frozen, validated, the same for every entry, and sent to the engine core.

`EngineArgs.create_engine_config()` makes an `EngineConfig` from what a user wrote, without touching disk or
network. `trioserve.model_sources` then finds the model and returns a `ResolvedModel`. The two together are
all that an engine core needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import attrs

from trioserve.tasks import Convert, Runner, Task

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "AdmissionConfig",
    "CPUKernels",
    "CacheConfig",
    "ClassActivation",
    "DType",
    "DenseActivation",
    "DenseModule",
    "EngineConfig",
    "GenerationDefaults",
    "LoRAConfig",
    "LoRAModule",
    "LogConfig",
    "ModelConfig",
    "Pooler",
    "PoolerConfig",
    "PoolingType",
    "Quantization",
    "ReasoningConfig",
    "ResolvedModel",
    "SchedulerConfig",
    "Similarity",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "SupervisionConfig",
]

DType = Literal["bfloat16", "float32"]
Quantization = Literal["auto", "none", "int8", "int4"]
PoolingType = Literal["mean", "cls", "last", "all"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
"""Of which tokens' hidden states a result is made: mean of all, the first, the last; all: each by itself."""
ClassActivation = Literal["softmax", "sigmoid", "identity"]
"""What makes probabilities of classes' logits; identity: they stay logits."""
DenseActivation = Literal["identity", "tanh", "sigmoid", "relu", "gelu", "gelu_tanh", "silu"]
"""gelu_tanh: GELU with the tanh approximation."""
CPUKernels = Literal["auto", "torch", "scalar", "avx2", "avx512", "avx512_bf16", "amx"]


def _at_least(least: int) -> Callable[..., None]:
    def validate(_: object, attribute: attrs.Attribute[Any], value: int) -> None:
        if value < least:
            raise ValueError(f"{attribute.name} must be an integer >= {least}, got {value!r}")

    return validate


def _above(bound: float) -> Callable[..., None]:
    def validate(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
        if not value > bound:
            raise ValueError(f"{attribute.name} must be a number above {bound:g}, got {value!r}")

    return validate


def _real(value: float) -> float:
    """An integer becomes a float, as on the way to the engine core: both ends compare what they have."""
    return float(value)


@attrs.frozen(kw_only=True)
class GenerationDefaults:
    """Sampling defaults that a model brings (generation_config.json) or a user sets; None: not given."""

    temperature: float | None = attrs.field(default=None, converter=attrs.converters.optional(_real))
    top_p: float | None = attrs.field(default=None, converter=attrs.converters.optional(_real))
    top_k: int | None = None
    min_p: float | None = attrs.field(default=None, converter=attrs.converters.optional(_real))
    repetition_penalty: float | None = attrs.field(default=None, converter=attrs.converters.optional(_real))
    max_new_tokens: int | None = None

    def overridden_by(self, other: GenerationDefaults) -> GenerationDefaults:
        given = {name: value for name, value in attrs.asdict(other).items() if value is not None}
        return attrs.evolve(self, **given)


@attrs.frozen(kw_only=True)
class LogConfig:
    """What is logged, and how much of it."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    requests: bool = False
    """One line per request: its id, prompt length and parameters (never the prompt's text)."""
    stats_interval: float = attrs.field(default=10.0, converter=_real)
    """Seconds between two lines of throughput; 0 switches them off."""
    access: bool = True
    """One line per HTTP request."""


@attrs.frozen(kw_only=True)
class PoolerConfig:
    """How hidden states become results, over what the model's files say; None: as they say."""

    pooling_type: PoolingType | None = None
    use_activation: bool | None = None
    """Normalize embeddings, make probabilities of classes; what a request says comes first."""
    dimensions: tuple[int, ...] | None = None
    """Sizes to which embeddings may be cut (matryoshka); empty: any."""
    enable_chunked_processing: bool = False
    """Texts that are too long are embedded in pieces, and the average by tokens is the result; else they are
    refused."""
    max_embed_len: int | None = attrs.field(default=None, validator=attrs.validators.optional(_at_least(1)))
    """Tokens of a text that is embedded in pieces, at most; None: no limit."""


@attrs.frozen(kw_only=True)
class ModelConfig:
    """Which model, and how it is to be run."""

    model: str
    """A directory, a .gguf file, the name of a packaged model, or a hub id."""
    tokenizer: str | None
    """Where the tokenizer comes from, if not from the model."""
    revision: str | None
    hf_token: str | None = attrs.field(repr=False)
    served_model_names: tuple[str, ...]
    """At least one; the first is the one that answers carry."""
    dtype: Literal["auto", "bfloat16", "float32"]
    quantization: Quantization = "auto"
    """As in `ResolvedModel`."""
    max_model_len: int | None
    """Prompt and output together, in tokens; None: what the model was made for."""
    seed: int
    generation: GenerationDefaults
    """What the user overrides."""
    runner: Literal["auto"] | Runner = "auto"
    """auto: what the model was made for."""
    convert: Convert = "auto"
    pooler: PoolerConfig = PoolerConfig()


@attrs.frozen(kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int
    """Tokens per block."""
    memory_bytes: int | None
    """None: from the memory that is free when the engine starts."""
    num_engines: int = 1
    """Engines that start side by side and share that memory."""
    enable_prefix_caching: bool
    dtype: Literal["auto", "int8"]
    """Of keys and values; auto: the model's."""


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """The limits of one step."""

    max_num_seqs: int
    """Sequences running at a time."""
    max_num_batched_tokens: int
    """Tokens (prompt, decode and drafts together) computed per step."""
    policy: Literal["fcfs", "priority", "deadline"]
    """Who is served first when there is not enough for all."""
    long_prefill_token_threshold: int
    """A prompt that lacks more than this is long: it gets at most this much of a step that others share."""
    prefill_beside_decodes: int
    """Prompt tokens, of all requests together, of a step in which others decode; more where many wait."""
    max_long_partial_prefills: int
    """Long prompts that are under way at a time; shorter ones behind them may overtake."""
    plan_ahead: bool
    """Schedule the next step while one runs."""
    max_loras: int | None = None
    """Different adapters in a step; None: there are none at all."""


@attrs.frozen(kw_only=True)
class SpeculativeConfig:
    """Tokens are guessed and checked, several per step: the output stays what it is."""

    method: Literal["ngram"] = "ngram"
    """ngram: what followed the last few tokens when they occurred before."""
    num_speculative_tokens: int = attrs.field(default=5, validator=_at_least(1))
    """Guesses per step, at most."""
    prompt_lookup_max: int = attrs.field(default=4, validator=_at_least(1))
    """Tokens that are looked up at first; then ever fewer."""
    prompt_lookup_min: int = attrs.field(default=2, validator=_at_least(1))

    def __attrs_post_init__(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min must be at most prompt_lookup_max ({self.prompt_lookup_max}), "
                f"got {self.prompt_lookup_min}"
            )


@attrs.frozen(kw_only=True)
class StructuredOutputsConfig:
    """How grammars are made; what a request asks for itself is in `StructuredOutputsParams`."""

    compile_timeout: float = attrs.field(default=5.0, converter=_real, validator=_above(0))
    """Seconds until a grammar that is not ready is refused."""
    cache_size: int = attrs.field(default=128, validator=_at_least(1))
    """Compiled grammars that are kept."""
    disable_any_whitespace: bool = False
    """For all requests; likewise the next."""
    disable_additional_properties: bool = False
    jump_ahead: bool = True
    """Tokens that the grammar forces are computed together instead of one per step."""


@attrs.frozen(kw_only=True)
class ReasoningConfig:
    """The texts between which a model thinks."""

    start: str = "<think>"
    end: str = "</think>"


@attrs.frozen(kw_only=True)
class AdmissionConfig:
    """How much may wait; None: no limit. What would exceed it is refused before any work is done for it."""

    max_num_queued_reqs: int | None
    """Sequences: a request with n completions counts n times."""
    max_num_queued_tokens: int | None
    """Prompt tokens of those that wait. A prompt that is longer than this by itself is taken if none wait."""


@attrs.frozen(kw_only=True)
class SupervisionConfig:
    """What follows the engine core's death, and when it counts as dead."""

    restart: Literal["never", "on-failure"]
    restart_limit: int
    """Restarts in a row, that is, without a longer time of good service between them."""
    restart_backoff: float = attrs.field(converter=_real)
    """Seconds before the first restart; doubled for each further one in a row."""
    requeue: bool
    """Requests that had no token yet are given to the new core, instead of failing; those that a second core
    dies of are not."""
    step_timeout: float = attrs.field(converter=_real)
    """Seconds after which a step that has not ended, or a core that does not answer, counts as death."""


@attrs.frozen(kw_only=True)
class LoRAModule:
    """An adapter that is there from the start."""

    name: str
    """For clients; in what an engine core is told, the adapter's key."""
    path: str
    """A directory in PEFT's layout."""
    base_model_name: str | None = None
    """Whose child `/v1/models` shows; None: that of the model's first name."""


@attrs.frozen(kw_only=True)
class LoRAConfig:
    """Low-rank adapters over the model's weights."""

    modules: tuple[LoRAModule, ...]
    max_loaded: int
    """Adapters in memory at a time."""
    max_rank: int


@attrs.frozen(kw_only=True)
class EngineConfig:
    """Everything `EngineArgs` decides, in its final form."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    speculative: SpeculativeConfig | None
    structured_outputs: StructuredOutputsConfig
    reasoning: ReasoningConfig | None
    """None: the marks of the reasoning parser."""
    reasoning_parser: str
    """A name of `trioserve.reasoning`."""
    max_logprobs: int
    """The most that a request may ask for; -1: no limit."""
    logits_processors: tuple[str, ...]
    """Custom ones, as module:Class, beside those that installed packages bring."""
    threads: int
    """Compute threads of the engine core."""
    cpu_kernels: CPUKernels
    """What computes: torch, or native kernels for processors of this kind; auto: the best there is."""
    engine: Literal["process", "inproc"]
    """Where the engine core runs: in a child process, or in the caller's."""
    admission: AdmissionConfig
    supervision: SupervisionConfig
    startup_timeout: float = attrs.field(converter=_real)
    """Seconds the engine core has, from its start until it is ready."""
    log: LogConfig
    lora: LoRAConfig | None = None
    """None: requests with an adapter are refused."""


@attrs.frozen(kw_only=True)
class DenseModule:
    """A layer that follows the pooling, of the sentence-transformers kind."""

    folder: str
    """Below the model's directory; holds a model.safetensors."""
    in_features: int
    out_features: int
    bias: bool = True
    activation: DenseActivation = "tanh"


@attrs.frozen(kw_only=True)
class Pooler:
    """How a model's hidden states become results."""

    pooling_type: PoolingType
    normalizes: bool = True
    """Embeddings get length 1, where a request does not say."""
    similarity: Similarity = "cosine"
    """What the score of two embeddings is; of the two distances, the negative."""
    hidden_size: int
    """Of an embedding that is not cut."""
    dense: tuple[DenseModule, ...] = ()
    """Layers between the pooling and the normalizing, in their order."""
    dimensions: tuple[int, ...] | None = None
    """Sizes to which embeddings may be cut; None: they may not be; empty: any below hidden_size."""
    labels: tuple[str, ...] = ()
    """Of classes, by their number; empty where there are none."""
    activation: ClassActivation = "softmax"
    """Of classes."""
    activates: bool = True
    """Classes get their activation, where a request does not say."""
    lower_case: bool = False
    """Texts are made lower case before they are tokenized."""
    prompts: dict[str, str] = attrs.field(factory=dict)
    """Name -> text that goes before texts of that kind (query, document, ...)."""
    default_prompt: str | None = None
    """The name of the one that goes before texts where none is named."""


@attrs.frozen(kw_only=True)
class ResolvedModel:
    """A model that lies on this machine in Hugging Face layout and can be served."""

    directory: str
    """Holds config.json and *.safetensors."""
    tokenizer_directory: str
    """Holds tokenizer.json and, where there are some, tokenizer_config.json and chat_template.jinja."""
    architecture: str
    """As in config.json's `architectures`, e.g. LlamaForCausalLM."""
    dtype: DType
    """Of what is computed between matrices, and of matrices that are not quantized."""
    quantization: Quantization = "auto"
    """Of matrices. auto: in blocks those that are stored so, if `dtype` is bfloat16; the others as by none.
    none: in `dtype`. int8, int4: quantized as they are loaded; `dtype` is bfloat16 then, and none is stored
    in blocks."""
    blocks: tuple[str, ...] = ()
    """GGUF's types of blocks in which matrices are stored, e.g. Q4_1; most frequent first."""
    vocab_size: int
    context_length: int
    """What the model was made for, in tokens."""
    max_model_len: int
    """What it is served with: at most `context_length`."""
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults
    """The model's own, overridden by the user's."""
    runner: Runner = "generate"
    tasks: tuple[Task, ...] = ("generate",)
    """What it can be asked for, the most usual first."""
    pooler: Pooler | None = None
    """None where nothing is pooled."""

    @property
    def serves_blocks(self) -> bool:
        """Matrices that are stored in blocks are served in them."""
        return self.quantization == "auto" and self.dtype == "bfloat16"

    @property
    def precision(self) -> str:
        """What it is served in, in words."""
        if self.quantization in {"int8", "int4"}:
            return f"{self.dtype}, weights in {self.quantization}"
        if not self.blocks:
            return self.dtype
        return f"{self.dtype}, weights {'in' if self.serves_blocks else 'from'} {' and '.join(self.blocks)}"
