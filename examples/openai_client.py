"""The official client against `trioserve serve`: python examples/openai_client.py [http://127.0.0.1:8000/v1]"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(base_url: str) -> None:
    with OpenAI(base_url=base_url, api_key="none") as client:
        answer = client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "What is the capital of Japan?"}],
            max_tokens=32,
            temperature=0,
        )
        print(answer.choices[0].message.content)

        with client.completions.create(
            model="smollm2-135m", prompt="Once upon a time", max_tokens=32, temperature=0, stream=True
        ) as chunks:
            for chunk in chunks:
                print(chunk.choices[0].text, end="", flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
