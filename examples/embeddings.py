"""Texts as vectors, and documents in the order in which they fit a question, over HTTP.

trioserve serve minilm-l6, and then: python examples/embeddings.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import json
import sys
import urllib.request

from openai import OpenAI

DOCUMENTS = [
    "Berlin is the capital of Germany.",
    "Paris has been the capital of France since the year 987.",
    "Bread rises because yeast makes gas of sugar.",
]


def main(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="minilm-l6", input=DOCUMENTS)
        for item in answer.data:
            print(f"{len(item.embedding)} numbers: {item.embedding[0]:.3f}, {item.embedding[1]:.3f}, ...")

    body = {"query": "What is the capital of France?", "documents": DOCUMENTS, "top_n": 2}
    request = urllib.request.Request(
        f"{url}/rerank", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        for result in json.load(reply)["results"]:
            print(f"{result['relevance_score']:.2f} {result['document']['text']}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
