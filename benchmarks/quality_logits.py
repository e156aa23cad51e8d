"""Logits of a text: by transformers in fp32, and by our executors in any form."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch
import transformers
from tokenizers import Tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from trioserve import EngineArgs, SamplingParams
from trioserve.model_sources.resolve import resolve_model
from trioserve.token_constraints import TokenConstraints
from trioserve.worker.batch import ScheduledSequence
from trioserve.worker.executors import make_executor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trioserve.worker.executor import Executor

    Windows = Sequence[Sequence[int]]

__all__ = ["Form", "by_transformers", "by_trioserve", "windows_of"]


@attrs.frozen(kw_only=True)
class Form:
    """How a model is computed."""

    model: str
    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    cpu_kernels: str = "auto"

    def engine_args(self) -> EngineArgs:
        return EngineArgs.from_dict(attrs.asdict(self))


def windows_of(text: str, model: str, size: int, count: int) -> list[list[int]]:
    """The text's first tokens, cut into `count` windows of `size`.

    Raises SystemExit: the text is too short.
    """
    resolved = resolve_model(EngineArgs.from_dict({"model": model}).create_engine_config().model)
    tokenizer = Tokenizer.from_file(str(Path(resolved.tokenizer_directory) / "tokenizer.json"))
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    if len(token_ids) < size * count:
        raise SystemExit(f"the text has {len(token_ids)} tokens, {count} windows of {size} are more")
    return [token_ids[size * number : size * (number + 1)] for number in range(count)]


def by_transformers(model: str, windows: Windows) -> list[torch.Tensor]:
    """Of the fp32 model, a directory or GGUF file (dequantized): fp32 [size, vocabulary] per window."""
    path = Path(model)
    if path.is_file():
        loaded = _from_gguf(path)
    else:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return [loaded(torch.tensor([window])).logits[0] for window in windows]


def _from_gguf(path: Path) -> transformers.PreTrainedModel:
    """`from_pretrained` would need another package for it."""
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.dtype = torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"{path}: transformers lacks {missing}, and does not know {unexpected}")
    model.tie_weights()
    return model


@contextmanager
def by_trioserve(form: Form, size: int) -> Iterator[Callable[[Sequence[int]], torch.Tensor]]:
    """What gives the logits of a window of at most `size` tokens: fp32 [tokens, vocabulary], valid until the
    next is asked for."""
    config = form.engine_args().create_engine_config()
    with torch.inference_mode():
        executor = make_executor(resolve_model(config.model), config)
        try:
            blocks = -(-size // config.cache.block_size)
            executor.allocate_kv_cache(blocks * len(executor.layout.windows))
            request_ids = iter(range(1 << 30))
            yield lambda window: _logits(executor, window, next(request_ids), blocks)
        finally:
            executor.close()


def _logits(executor: Executor, window: Sequence[int], request_id: int, blocks: int) -> torch.Tensor:
    """All in one step. Every group of layers has `blocks` blocks of its own."""
    sequence = ScheduledSequence(
        request_id=request_id,
        start=0,
        token_ids=window,
        block_tables=[
            range(group * blocks, (group + 1) * blocks) for group in range(len(executor.layout.windows))
        ],
        samples=False,
        params=SamplingParams(),
        constraints=TokenConstraints(),
        seed=0,
        prompt_token_ids=window,
        output_token_ids=[],
        stop_token_ids=frozenset(),
        prompt_logprobs_start=len(window),
    )
    (first_row,) = executor.forward([sequence], {})
    return torch.from_numpy(executor.logits(range(first_row, first_row + len(window))))
