"""Embeds texts by trioserve, for `embeddings.py`.

    python embeddings_ours.py MODEL TEXTS.json VECTORS.npy FLAGS

FLAGS is a JSON object of keyword arguments of `LLM`. Prints a JSON object: seconds for all texts, after some
for warming up, and their tokens.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from trioserve import LLM


def main() -> None:
    name, texts_path, vectors_path, flags = sys.argv[1:]
    texts = json.loads(Path(texts_path).read_text())
    with LLM(model=name, max_model_len=512, **json.loads(flags)) as llm:
        llm.embed(texts[:32], truncate_prompt_tokens=-1, use_tqdm=False)
        began = time.perf_counter()
        outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
        seconds = time.perf_counter() - began
    np.save(vectors_path, np.array([output.outputs.embedding for output in outputs], np.float32))
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    print(json.dumps({"seconds": seconds, "tokens": tokens}))


if __name__ == "__main__":  # the engine core is a child process
    main()
