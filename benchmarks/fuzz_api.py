"""schemathesis against a running server: by its own description, or by OpenAI's.

python benchmarks/fuzz_api.py http://127.0.0.1:8000 --examples 50 --phases coverage,fuzzing
python benchmarks/fuzz_api.py http://127.0.0.1:8000 --examples 50 --openai openai-openapi.yaml

Exits with 1 if an answer is a 5xx or not what the description says, each event of a stream included. Only 504
may be: it is the answer to a request whose own `timeout` is too short. The number of examples is per
operation; further options are schemathesis' own.

Two checks are off: `positive_data_acceptance`, as a description says what one field may be and not which
fields go together, what the model's vocabulary is or how long its context; and with OpenAI's description
`negative_data_rejection` too, as there are fields of it that we have no use for, and do not look into.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import yaml

_HERE = Path(__file__).parent

_CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""

_OPENAI_OPERATIONS = {
    "/chat/completions": "post",
    "/completions": "post",
    "/models": "get",
    "/models/{model}": "get",
    "/responses": "post",
}

_EVENTS = {
    "createChatCompletion": "CreateChatCompletionStreamResponse",
    "createCompletion": "CreateCompletionResponse",
    "createResponse": "ResponseStreamEvent",
}


def get(url: str) -> Any:
    with urllib.request.urlopen(url) as response:
        return json.load(response)


def name_models(description: Any, names: list[str]) -> None:
    """Have requests ask for a model that there is; else 404 is all that we see."""
    schemas = description["components"]["schemas"]
    for name in set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(_request_bodies(description)))):
        _set_models(schemas[name], schemas, names)


def _request_bodies(description: Any) -> list[Any]:
    operations = [operation for path in description["paths"].values() for operation in path.values()]
    return [operation["requestBody"] for operation in operations if "requestBody" in operation]


def _set_models(schema: Any, schemas: Any, names: list[str]) -> None:
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if "model" in schema.get("properties", {}):
        schema["properties"]["model"] = {"enum": names}
    for part in schema.get("allOf", ()):
        _set_models(part, schemas, names)


def read_openai(path: Path) -> Any:
    """OpenAI's description of what we serve, with what it leaves unsaid.

    It documents no errors but 429, no stream of completions, and writes `nullable`, which OpenAPI 3.1 no
    longer has.
    """
    whole = with_nulls(yaml.load(path.read_text(), Loader=yaml.CSafeLoader))
    whole["paths"] = {p: {method: whole["paths"][p][method]} for p, method in _OPENAI_OPERATIONS.items()}
    whole.pop("security", None)
    error = {"$ref": "#/components/schemas/ErrorResponse"}
    for operations in whole["paths"].values():
        for operation in operations.values():
            answers = operation["responses"]
            answers.pop("429", None)
            answers["4XX"] = {"description": "error", "content": {"application/json": {"schema": error}}}
            if operation["operationId"] in _EVENTS:
                answers["200"]["content"]["text/event-stream"] = _stream(operation["operationId"], error)
    return whole


def _stream(operation_id: str, error: Any) -> Any:
    """As our own description has it."""
    event = {"$ref": f"#/components/schemas/{_EVENTS[operation_id]}"}
    return {
        "schema": {},
        "x-event-schema": {"anyOf": [event, error]},
        "x-ends-with-done": operation_id != "createResponse",
    }


def with_nulls(schema: Any) -> Any:
    if isinstance(schema, list):
        return [with_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: with_nulls(value) for key, value in schema.items()}
    if changed.get("nullable") in {True, False} and changed.pop("nullable"):
        return {"anyOf": [changed, {"type": "null"}]}
    return changed


def run(url: str, openai: Path | None, options: list[str]) -> int:
    """schemathesis' exit code."""
    off = ["positive_data_acceptance"]
    if openai is not None:
        off.append("negative_data_rejection")
    description = get(f"{url}/openapi.json") if openai is None else read_openai(openai)
    name_models(description, [model["id"] for model in get(f"{url}/v1/models")["data"]])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "openapi.json"
        path.write_text(json.dumps(description, default=str))  # YAML has dates
        (Path(directory) / "schemathesis.toml").write_text(_CONFIG)
        command = [
            "st", "run", str(path), "--url", url + ("" if openai is None else "/v1"), "--checks", "all",
            "--exclude-checks", ",".join(off), "--continue-on-failure", "--generation-database", "none",
            "--suppress-health-check", "all", "--request-timeout", "120", "--max-response-time", "120",
            "--no-color", *options,
        ]  # fmt: skip
        environment = {
            **os.environ,
            "SCHEMATHESIS_HOOKS": "fuzz_api_checks",
            "PYTHONPATH": str(_HERE),
            "FUZZED_DESCRIPTION": str(path),
        }
        return subprocess.run(command, env=environment, cwd=directory, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--openai", type=Path, help="OpenAI's description, to be used instead of our own")
    parser.add_argument("--examples", type=int, default=100)
    arguments, options = parser.parse_known_args()
    return run(arguments.url, arguments.openai, [f"--max-examples={arguments.examples}", *options])


if __name__ == "__main__":
    sys.exit(main())
