"""Audio files to text, with the times at which it is said.

python examples/transcribe.py talk.mp3 interview.wav
"""

from __future__ import annotations

import sys

from trioserve import LLM, TranscriptionParams


def main() -> None:
    params = TranscriptionParams(language="en", timestamps="segment")
    with LLM(model="whisper-tiny.en") as llm:
        for path, result in zip(sys.argv[1:], llm.transcribe(sys.argv[1:], params), strict=True):
            print(f"{path}: {result.duration:.1f} s of {result.language}")
            for segment in result.segments:
                print(f"  {segment.start:7.2f} - {segment.end:7.2f} {segment.text}")


if __name__ == "__main__":
    main()
