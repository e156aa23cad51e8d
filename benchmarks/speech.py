"""Speech: trioserve, faster-whisper and transformers on the same clips and machine, in turn.

    python benchmarks/speech.py --peer-python VENV/bin/python --clip talk.wav

Ten sentences are spoken by espeak-ng (which must be there), one by one and all as one audio; `--clip` adds
files of your own. Each program is a process of its own with two threads and greedy decoding; transformers
runs twice, the second time with the five beams that its pipeline has by itself. Every round runs all of them.
Prints, per program and load, seconds of audio per second, the word error rate, and how far the segments' ends
are from those of transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import describe_machine, git_commit
from speech_clips import SENTENCES, speak, word_error_rate

from trioserve.args import EngineArgs
from trioserve.model_sources import resolve_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_HERE = Path(__file__).parent


def main() -> None:
    args = _parse()
    model = resolve_model(EngineArgs(model=args.model).create_engine_config().model)
    print(json.dumps({"machine": describe_machine(), "commit": git_commit(), "model": args.model}))
    with tempfile.TemporaryDirectory() as folder:
        clips = speak(Path(folder))
        _compare("ten clips", args, model.directory, clips, SENTENCES)
        _compare("one audio", args, model.directory, [clips.joined], [" ".join(SENTENCES)])
        if args.clip:
            _compare("own", args, model.directory, args.clip, None)


def _compare(
    load: str,
    args: argparse.Namespace,
    directory: str,
    files: Sequence[Path | str],
    texts: Sequence[str] | None,
) -> None:
    """Run all as often as asked for, and print what came of it."""
    own = [sys.executable, _HERE / "speech_ours.py", directory]
    peer = [args.peer_python, _HERE / "speech_peers.py"]
    commands = {
        "trioserve": own,
        "faster-whisper float32": [*peer, "faster-whisper", args.ctranslate2, "float32"],
        "faster-whisper int8": [*peer, "faster-whisper", args.ctranslate2, "int8"],
        "transformers": [*peer, "transformers", directory, "1"],
        "transformers, 5 beams": [*peer, "transformers", directory, "5"],
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for _ in range(args.rounds):
        for name, command in commands.items():
            runs[name].append(_run([*command, *files]))
    for name, found in runs.items():
        print(json.dumps(_summary(load, name, found, runs["transformers"][0], texts)), flush=True)


def _summary(
    load: str,
    name: str,
    runs: Sequence[Mapping[str, Any]],
    reference: Mapping[str, Any],
    texts: Sequence[str] | None,
) -> dict[str, Any]:
    seconds = statistics.median(run["seconds"] for run in runs)
    summary: dict[str, Any] = {
        "load": load,
        "program": name,
        "audio_seconds": round(runs[0]["audio"], 1),
        "seconds": [round(run["seconds"], 3) for run in runs],
        "audio_seconds_per_second": round(runs[0]["audio"] / seconds, 1),
    }
    if texts is not None:
        summary["word_error_rate"] = round(word_error_rate(texts, runs[0]["texts"]), 4)
    ends = zip(runs[0]["ends"], reference["ends"], strict=True)
    differences = [
        abs(own - other)
        for mine, theirs in ends
        if len(mine) == len(theirs)  # else they cut the text elsewhere
        for own, other in zip(mine, theirs, strict=True)
    ]
    summary["segment_ends_compared"] = len(differences)
    summary["greatest_difference"] = round(max(differences, default=0.0), 3)
    return summary


def _run(command: Sequence[str | Path]) -> dict[str, Any]:
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="of an environment with the two others")
    parser.add_argument("--ctranslate2", required=True, help="the model's directory for faster-whisper")
    parser.add_argument("--model", default="whisper-tiny.en")
    parser.add_argument("--clip", action="append", help="an audio file; may be given several times")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
