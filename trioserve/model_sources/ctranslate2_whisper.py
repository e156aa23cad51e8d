"""Whisper in CTranslate2's layout and in Hugging Face's: names of tensors, and the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trioserve.errors import ModelNotSupportedError, ModelSourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trioserve.model_sources.ctranslate2_file import CTranslate2File, StoredTensor

__all__ = ["ARCHITECTURE", "SPECIFICATION", "Part", "find_parts", "generation_config", "model_config"]

ARCHITECTURE = "WhisperForConditionalGeneration"
SPECIFICATION = "WhisperSpec"

_PLAIN = {
    "encoder/conv1": "encoder.conv1",
    "encoder/conv2": "encoder.conv2",
    "encoder/layer_norm": "encoder.layer_norm",
    "decoder/layer_norm": "decoder.layer_norm",
}
_LAYER = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "self_attention/linear_1": "self_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
_STACKED = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
}
"""Several matrices, one above the other."""
_KINDS = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias"}


@attrs.frozen
class Part:
    """A tensor of the Hugging Face layout: some rows of one of CTranslate2's."""

    source: str
    index: int
    """Which of `count` equal parts, from the top."""
    count: int


def find_parts(file: CTranslate2File) -> dict[str, Part]:
    """Name of a Hugging Face tensor -> where it is. Keys' biases are left out: they are zero, and Hugging
    Face has none.

    Raises:
      ModelNotSupportedError: weights are quantized.
      ModelSourceError: a tensor is lacking.
    """
    found = {
        "model.decoder.embed_tokens.weight": Part("decoder/embeddings/weight", 0, 1),
        "model.encoder.embed_positions.weight": Part("encoder/position_encodings/encodings", 0, 1),
        "model.decoder.embed_positions.weight": Part("decoder/position_encodings/encodings", 0, 1),
    }
    for name in file.tensors:
        found |= _parts_of(name)
    for part in found.values():
        kind = _get(file, part.source).dtype
        if "int" in kind:
            raise ModelNotSupportedError(
                f"its weights are quantized ({part.source} is {kind}); supported are float16, bfloat16 and "
                "float32"
            )
    return found


def _parts_of(name: str) -> dict[str, Part]:
    module, _, kind = name.rpartition("/")
    if kind not in _KINDS:
        return {}
    targets = list(_targets(module))
    return {
        f"model.{target}.{_KINDS[kind]}": Part(name, index, len(targets))
        for index, target in enumerate(targets)
        if not (target.endswith("k_proj") and kind == "bias")
    }


def _targets(module: str) -> Iterator[str]:
    if module in _PLAIN:
        yield _PLAIN[module]
        return
    side, _, rest = module.partition("/layer_")
    number, _, inner = rest.partition("/")
    for target in _STACKED.get(inner, [_LAYER[inner]] if inner in _LAYER else []):
        yield f"{side}.layers.{number}.{target}"


def model_config(file: CTranslate2File, num_heads: Mapping[str, int]) -> dict[str, Any]:
    """config.json, but for token ids. num_heads: of encoder and decoder.

    Raises:
      ModelSourceError: a tensor is lacking.
    """
    vocab_size, hidden_size = _shape(file, "decoder/embeddings/weight")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "dtype": _get(file, "decoder/embeddings/weight").dtype,
        "activation_function": "gelu",
        "vocab_size": vocab_size,
        "d_model": hidden_size,
        "num_mel_bins": _shape(file, "encoder/conv1/weight")[1],
        "max_source_positions": _shape(file, "encoder/position_encodings/encodings")[0],
        "max_target_positions": _shape(file, "decoder/position_encodings/encodings")[0],
        **_stack(file, "encoder", num_heads["encoder"]),
        **_stack(file, "decoder", num_heads["decoder"]),
        "scale_embedding": False,
        "tie_word_embeddings": True,
    }


def _stack(file: CTranslate2File, side: str, num_heads: int) -> dict[str, int]:
    layers = {name.split("/")[1] for name in file.tensors if name.startswith(f"{side}/layer_")} - {
        "layer_norm"
    }
    return {
        f"{side}_layers": len(layers),
        f"{side}_attention_heads": num_heads,
        f"{side}_ffn_dim": _shape(file, f"{side}/layer_0/ffn/linear_0/weight")[0],
    }


def _shape(file: CTranslate2File, name: str) -> tuple[int, ...]:
    return _get(file, name).shape


def _get(file: CTranslate2File, name: str) -> StoredTensor:
    try:
        return file.tensors[name]
    except KeyError:
        raise ModelSourceError(f"it has no {name}") from None


def generation_config(config: Mapping[str, Any], tokens: Mapping[str, int]) -> dict[str, Any]:
    """generation_config.json. config: CTranslate2's config.json; tokens: the tokenizer's added ones."""
    eot, sot = tokens["<|endoftext|>"], tokens["<|startoftranscript|>"]
    is_multilingual = eot != 50_256
    languages = {
        f"<|{name[2:-2]}|>": token
        for name, token in tokens.items()
        if token in set(config.get("lang_ids", ()))
    }
    tasks = {task: tokens[f"<|{task}|>"] for task in ("transcribe", "translate")}
    return {
        "bos_token_id": eot,
        "eos_token_id": eot,
        "pad_token_id": eot,
        "decoder_start_token_id": sot,
        "prev_sot_token_id": tokens["<|startofprev|>"],
        "no_timestamps_token_id": tokens["<|notimestamps|>"],
        "max_initial_timestamp_index": 50,
        "max_length": 448,
        "return_timestamps": False,
        "is_multilingual": is_multilingual,
        "suppress_tokens": config.get("suppress_ids", []),
        "begin_suppress_tokens": config.get("suppress_ids_begin", []),
        "alignment_heads": config.get("alignment_heads", []),
        **({"lang_to_id": languages, "task_to_id": tasks} if is_multilingual else {}),
    }
