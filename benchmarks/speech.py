"""Speech: trioserve, faster-whisper and transformers on the same clips and machine, in turn.

    python benchmarks/speech.py --peer-python VENV/bin/python --ctranslate2 DIRECTORY [--clip talk.wav]
    ... --load clips --program trioserve --program transformers --rounds 1

Ten sentences are spoken by espeak-ng (which must be there), one by one (the load `clips`) and all as one
(`audio`); `--clip` adds files of your own (`own`). Each program is a process of its own with two threads; it
runs with five beams and what else it does by itself, and again with one beam. Every round runs all that were
chosen; none takes more than a minute on two idle cores.
Prints, per program and load, seconds of audio per second, the word error rate, and how far the segments' ends
are from those of transformers (with as many beams, if it was chosen, too).
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
        loads: dict[str, tuple[Sequence[Path | str], Sequence[str] | None]] = {
            "clips": (clips, SENTENCES),
            "audio": ([clips.joined], [" ".join(SENTENCES)]),
        }
        if args.clip:
            loads["own"] = args.clip, None
        for load in args.load or loads:
            _compare(load, args, model.directory, *loads[load])


def _compare(
    load: str,
    args: argparse.Namespace,
    directory: str,
    files: Sequence[Path | str],
    texts: Sequence[str] | None,
) -> None:
    """Run all as often as asked for, and print what came of it."""
    commands = _commands(args, directory)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.program or commands}
    for _ in range(args.rounds):
        for name, found in runs.items():
            found.append(_run([*commands[name], *files]))
    for name, found in runs.items():
        reference = runs.get("transformers, 1 beam" if name.endswith("1 beam") else "transformers")
        print(json.dumps(_summary(load, name, found, reference and reference[0], texts)), flush=True)


def _commands(args: argparse.Namespace, directory: str) -> dict[str, list[str | Path]]:
    """By name, without the files."""
    own: list[str | Path] = [sys.executable, _HERE / "speech_ours.py", directory]
    peer: list[str | Path] = [args.peer_python, _HERE / "speech_peers.py"]
    programs = {
        "trioserve": own,
        "faster-whisper float32": [*peer, "faster-whisper", args.ctranslate2, "float32"],
        "faster-whisper int8": [*peer, "faster-whisper", args.ctranslate2, "int8"],
        "transformers": [*peer, "transformers", directory, "float32"],
    }
    with_five = {name: [*command, "5"] for name, command in programs.items()}
    return with_five | {f"{name}, 1 beam": [*command, "1"] for name, command in programs.items()}


def _summary(
    load: str,
    name: str,
    runs: Sequence[Mapping[str, Any]],
    reference: Mapping[str, Any] | None,
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
    if reference is not None:
        summary |= _compare_ends(runs[0]["ends"], reference["ends"])
    return summary


def _compare_ends(own: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> dict[str, Any]:
    differences = [
        abs(mine - other)
        for ours, theirs in zip(own, reference, strict=True)
        if len(ours) == len(theirs)  # else they cut the text elsewhere
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return {
        "segment_ends_compared": len(differences),
        "greatest_difference": round(max(differences, default=0.0), 3),
    }


def _run(command: Sequence[str | Path]) -> dict[str, Any]:
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="of an environment with the two others")
    parser.add_argument("--ctranslate2", required=True, help="the model's directory for faster-whisper")
    parser.add_argument("--model", default="whisper-tiny.en")
    parser.add_argument("--load", action="append", choices=["clips", "audio", "own"])
    parser.add_argument("--program", action="append", help="by its name in the output; all by default")
    parser.add_argument("--clip", action="append", help="an audio file; may be given several times")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
