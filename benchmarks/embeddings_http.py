"""Embeds texts over HTTP, for `embeddings.py`: trioserve in a process of its own, and a client with several
connections that sends a batch of texts on each."""

from __future__ import annotations

import base64
import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from peers import running, trioserve

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stream_client import Target

__all__ = ["run_http"]

_CONNECTIONS = 4
_TEXTS_PER_REQUEST = 32
_FLAGS = ("--max-model-len", "512")


def run_http(model: str, texts: Sequence[str], vectors: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Seconds for all texts, after some for warming up, and their tokens; vectors: where they are written."""
    given = [f"--{flag}" for flag in flags]
    with running(trioserve("trioserve", model, [*_FLAGS, *given])) as server:
        _embed(server.target, texts[:_TEXTS_PER_REQUEST])
        began = time.perf_counter()
        answers = _embed(server.target, texts)
        seconds = time.perf_counter() - began
    encoded = [item["embedding"] for answer in answers for item in answer["data"]]
    np.save(vectors, np.array([np.frombuffer(base64.b64decode(one), np.float32) for one in encoded]))
    return {"seconds": seconds, "tokens": sum(answer["usage"]["prompt_tokens"] for answer in answers)}


def _embed(target: Target, texts: Sequence[str]) -> list[dict[str, Any]]:
    starts = range(0, len(texts), _TEXTS_PER_REQUEST)
    with ThreadPoolExecutor(_CONNECTIONS) as threads:
        return list(
            threads.map(lambda start: _post(target, texts[start : start + _TEXTS_PER_REQUEST]), starts)
        )


def _post(target: Target, texts: Sequence[str]) -> dict[str, Any]:
    body = {
        "model": target.model,
        "input": texts,
        "encoding_format": "base64",
        "truncate_prompt_tokens": -1,
    }
    connection = http.client.HTTPConnection(target.host, target.port, timeout=300)
    try:
        connection.request("POST", "/v1/embeddings", json.dumps(body), {"Content-Type": "application/json"})
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        if "data" not in answer:
            raise SystemExit(f"no embeddings: {answer}")
        return answer
    finally:
        connection.close()
