"""`LLM.transcribe` of some files, for `speech.py`. Prints one line of JSON.

python benchmarks/speech_ours.py MODEL BEAMS FILE ...
"""

from __future__ import annotations

import json
import sys
import time

from trioserve import LLM, Speech, TranscriptionParams


def main() -> None:
    model, beams, *files = sys.argv[1:]
    params = TranscriptionParams(language="en", beam_width=int(beams))
    with LLM(model=model, threads=2, dtype="float32", log={"stats_interval": 0}) as llm:
        # What is made on first use; of other audio, for the engine remembers what it has heard.
        llm.transcribe(Speech.from_samples([0.0, 0.1] * 8000), params, use_tqdm=False)
        started = time.perf_counter()
        results = llm.transcribe(files, params, use_tqdm=False)
        seconds = time.perf_counter() - started
    summary = {
        "seconds": seconds,
        "audio": sum(result.duration for result in results),
        "texts": [result.text for result in results],
        "ends": [[segment.end for segment in result.segments] for result in results],
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
