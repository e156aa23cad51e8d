"""The same by others, for `speech.py`, in an environment that has them. Prints one line of JSON.

python benchmarks/speech_peers.py faster-whisper DIRECTORY float32|int8 BEAMS FILE ...
python benchmarks/speech_peers.py transformers DIRECTORY float32 BEAMS FILE ...
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from faster_whisper.audio import decode_audio  # of both: files are read by the same library as ours

_THREADS = 2
_WARMING = np.tile(np.float32([0.0, 0.1]), 8000)


def main() -> None:
    program, directory, precision, beams, *rest = sys.argv[1:]
    open_program = _faster_whisper if program == "faster-whisper" else _transformers
    hear = open_program(directory, precision, int(beams))
    hear(_WARMING)
    started = time.perf_counter()
    samples = [decode_audio(file) for file in rest]
    heard = [hear(each) for each in samples]
    seconds = time.perf_counter() - started
    summary = {
        "seconds": seconds,
        "audio": sum(len(each) for each in samples) / 16_000,
        "texts": [text for text, _ in heard],
        "ends": [ends for _, ends in heard],
    }
    print(json.dumps(summary))


def _faster_whisper(directory: str, precision: str, beams: int) -> Any:
    from faster_whisper import WhisperModel  # noqa: PLC0415 - only one of the two is wanted

    model = WhisperModel(directory, device="cpu", compute_type=precision, cpu_threads=_THREADS)

    def hear(samples: np.ndarray) -> tuple[str, list[float]]:
        segments, _ = model.transcribe(samples, language="en", beam_size=beams)
        found = list(segments)
        return "".join(segment.text for segment in found).strip(), [segment.end for segment in found]

    return hear


def _transformers(directory: str, precision: str, beams: int) -> Any:
    import torch  # noqa: PLC0415 - as above
    import transformers  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(_THREADS)
    recognize = transformers.pipeline(
        "automatic-speech-recognition",
        model=transformers.WhisperForConditionalGeneration.from_pretrained(
            directory, dtype=getattr(torch, precision)
        ),
        tokenizer=transformers.AutoTokenizer.from_pretrained(directory),
        feature_extractor=transformers.WhisperFeatureExtractor(),
    )

    def hear(samples: np.ndarray) -> tuple[str, list[float]]:
        found = recognize(samples, return_timestamps=True, generate_kwargs={"num_beams": beams})
        return found["text"].strip(), [chunk["timestamp"][1] or 0.0 for chunk in found["chunks"]]

    return hear


if __name__ == "__main__":
    main()
