"""Embeddings: trioserve and sentence-transformers on the same texts and machine, in turn.

    python benchmarks/embeddings.py --peer-python VENV/bin/python --rounds 3

Texts are pieces of a book: `mixed` has as many of each length, from one word to the model's limit, `short`
has 5 to 40 words. Each program is a process of its own, with its own tokenizing; ours is `LLM.embed`, or with
--http a server and a client with four connections; theirs is `SentenceTransformer.encode`. Every round runs
both, so that what else happens on the machine strikes both. Prints texts per second, the ratio of the
medians, and the greatest difference of any value of the vectors.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from embeddings_http import run_http
from machine import describe_machine, git_commit

from trioserve.args import EngineArgs
from trioserve.model_sources import resolve_model

if TYPE_CHECKING:
    from collections.abc import Sequence

_HERE = Path(__file__).parent
_WORDS = {"mixed": (1, 375), "short": (5, 40)}
"""Of a text, from and to. 375 words are about 512 tokens."""


def main() -> None:
    args = _parse()
    model = resolve_model(EngineArgs(model=args.model).create_engine_config().model)
    print(json.dumps({"machine": describe_machine(), "commit": git_commit()}))
    with tempfile.TemporaryDirectory() as folder:
        for load in args.loads:
            texts = Path(folder) / "texts.json"
            texts.write_text(json.dumps(make_texts(args.texts, *_WORDS[load])))
            _compare(load, args, model.directory, texts)


def make_texts(count: int, fewest: int, most: int) -> list[str]:
    """Pieces of a book, their lengths spread evenly, in random order."""
    words = (_HERE / "texts/alice.txt").read_text().split()
    draw = random.Random(0)
    lengths = [fewest + (most - fewest) * index // max(count - 1, 1) for index in range(count)]
    draw.shuffle(lengths)
    starts = [draw.randrange(len(words) - length) for length in lengths]
    return [" ".join(words[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def _compare(load: str, args: argparse.Namespace, directory: str, texts: Path) -> None:
    """Run both as often as asked for, and print what came of it."""
    ours, theirs = texts.with_name("ours.npy"), texts.with_name("theirs.npy")
    runs: dict[str, list[dict[str, Any]]] = {"trioserve": [], "sentence-transformers": []}
    peer = [args.peer_python, _HERE / "embeddings_peer.py", directory, texts, theirs]
    for _ in range(args.rounds):
        runs["trioserve"].append(_run_ours(args, directory, texts, ours))
        runs["sentence-transformers"].append(_run(peer))
    medians = {name: statistics.median(run["seconds"] for run in found) for name, found in runs.items()}
    difference = float(np.abs(np.load(ours) - np.load(theirs)).max())
    result = {
        "load": load,
        "over": "HTTP" if args.http else "LLM.embed",
        "texts": args.texts,
        "tokens": runs["trioserve"][0]["tokens"],
        "texts_per_second": {name: round(args.texts / seconds, 1) for name, seconds in medians.items()},
        "seconds": {name: [round(run["seconds"], 3) for run in found] for name, found in runs.items()},
        "ratio": round(medians["sentence-transformers"] / medians["trioserve"], 2),
        "greatest_difference": difference,
        "versions": runs["sentence-transformers"][0]["versions"],
    }
    print(json.dumps(result), flush=True)


def _run_ours(args: argparse.Namespace, directory: str, texts: Path, vectors: Path) -> dict[str, Any]:
    if args.http:
        return run_http(directory, json.loads(texts.read_text()), vectors, args.flags)
    flags = json.dumps(dict(flag.split("=", 1) for flag in args.flags))
    return _run([sys.executable, _HERE / "embeddings_ours.py", directory, texts, vectors, flags])


def _run(command: Sequence[str | Path]) -> dict[str, Any]:
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="of an environment with sentence-transformers")
    parser.add_argument("--model", default="minilm-l6", help="one whose pooling is the mean, normalized")
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", nargs="+", default=list(_WORDS), choices=_WORDS)
    parser.add_argument("--http", action="store_true", help="ours over HTTP")
    parser.add_argument("--flags", nargs="*", default=(), help="of ours, as NAME=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
