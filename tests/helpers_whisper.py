"""Tiny Whisper models, and audio for them."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
import transformers

from helpers_worker import resolved
from trioserve.audio_input import AudioInput

if TYPE_CHECKING:
    from pathlib import Path

    from trioserve.config import ResolvedModel

TINY: dict[str, Any] = {
    "vocab_size": 101,
    "d_model": 32,
    "num_mel_bins": 80,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_source_positions": 1500,
    "max_target_positions": 64,
    "init_std": 0.2,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "decoder_start_token_id": 3,
}


def tiny_whisper(directory: Path) -> tuple[Any, ResolvedModel]:
    """A random model by transformers, the same one each time, and as we serve it from `directory`."""
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**TINY)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    generation = {"no_timestamps_token_id": 50, "eos_token_id": 2}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    ours = resolved(directory, architecture="WhisperForConditionalGeneration", max_model_len=64)
    return model, attrs.evolve(ours, context_length=64, tasks=("transcription",))


def noise(seed: int, seconds: float = 2.0) -> AudioInput:
    samples = np.random.default_rng(seed).normal(scale=0.1, size=int(seconds * 16_000)).astype(np.float32)
    return AudioInput(digest=hashlib.sha256(samples.tobytes()).hexdigest(), samples=samples.tobytes())


def features(audio: AudioInput) -> torch.Tensor:
    """As transformers makes them: [1, mels, 3000]."""
    extractor = transformers.WhisperFeatureExtractor()
    samples = np.frombuffer(audio.samples, np.float32)
    found: torch.Tensor = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
    return found
