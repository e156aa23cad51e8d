"""Embeds texts by sentence-transformers, for `embeddings.py`, by the Python of an environment that has it.

    python embeddings_peer.py MODEL_DIRECTORY TEXTS.json VECTORS.npy

Prints a JSON object: seconds for all texts after some for warming up, and versions.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer, models

_MAX_TOKENS = 512


def main() -> None:
    directory, texts_path, vectors_path = sys.argv[1:]
    texts = json.loads(Path(texts_path).read_text())
    transformer = models.Transformer(directory)
    transformer.max_seq_length = _MAX_TOKENS
    # By hand, since the packaged model lacks the folder that says so.
    pooling = models.Pooling(transformer.get_embedding_dimension(), "mean")
    model = SentenceTransformer(modules=[transformer, pooling, models.Normalize()], device="cpu")
    model.encode(texts[:32])
    began = time.perf_counter()
    vectors = model.encode(texts)
    seconds = time.perf_counter() - began
    np.save(vectors_path, vectors)
    packages = {name: version(name) for name in ("sentence-transformers", "transformers", "torch")}
    print(json.dumps({"seconds": seconds, "versions": packages}))


main()
