"""Cuts out of OpenAI's description of its API what its answers on our routes are.

python tests/extract_openai_schemas.py openai-openapi.yaml > tests/data/openai_schemas.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOTS = (
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "CreateEmbeddingResponse",
    "ErrorResponse",
    "ListModelsResponse",
    "Model",
    "Response",
    "ResponseItemList",
    "ResponseStreamEvent",
    "TokenCountsResource",
)

_ANNOTATIONS = {"default", "deprecated", "description", "example", "examples", "externalDocs", "title"}


def extract(description: dict[str, Any]) -> dict[str, Any]:
    """The schemas that are reached from `ROOTS`, with what says something about values and nothing else."""
    schemas = description["components"]["schemas"]
    found: dict[str, Any] = {}
    names = list(ROOTS)
    while names:
        name = names.pop()
        if name not in found:
            found[name] = _bare(schemas[name])
            names += re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(found[name]))
    return dict(sorted(found.items()))


def _bare(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bare(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: part for key, part in schema.items() if key not in _ANNOTATIONS and not key.startswith("x-")}
    return {
        key: {name: _bare(value) for name, value in part.items()} if key == "properties" else _bare(part)
        for key, part in kept.items()
    }


def main(path: str) -> None:
    description = yaml.load(Path(path).read_text(), Loader=yaml.CSafeLoader)
    info = description["info"]
    notice = (
        f"From OpenAI's description of its API, version {info['version']}, "
        f"https://github.com/openai/openai-openapi, {info['license']['name']} licence, (c) OpenAI; "
        "by tests/extract_openai_schemas.py."
    )
    lines = (
        f"{json.dumps(name)}:{json.dumps(schema, separators=(',', ':'))}"
        for name, schema in extract(description).items()
    )
    body = ",\n".join(lines)
    print(f'{{"$comment":{json.dumps(notice)},\n"components":{{"schemas":{{\n{body}\n}}}}}}')


if __name__ == "__main__":
    main(sys.argv[1])
