"""What `fuzz_api.py` adds to schemathesis: it reads streams, and makes requests that get served."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import schemathesis


@cache
def _description() -> Any:
    return json.loads(Path(os.environ["FUZZED_DESCRIPTION"]).read_text())


@cache
def _stream(path: str, method: str) -> tuple[jsonschema.Draft202012Validator, bool]:
    """What the events of a route are, and whether [DONE] ends them."""
    described = _description()["paths"][path][method.lower()]["responses"]["200"]["content"][
        "text/event-stream"
    ]
    schema = {"components": _description()["components"], "allOf": [described["x-event-schema"]]}
    return jsonschema.Draft202012Validator(schema), described["x-ends-with-done"]


def _as_described(path: str, event: Any) -> Any:
    """OpenAI describes no stream of completions: usage is null, and no choice has ended, until the end."""
    if path != "/completions" or "choices" not in event:
        return event
    choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in event["choices"]]
    kept = {key: value for key, value in event.items() if key != "usage" or value is not None}
    return {**kept, "choices": choices}


_KEPT = 3
_REQUIRED = {"input", "max_tokens", "messages", "model", "prompt", "sampling_params", "token_ids", "tokens"}

_ASKED = {
    "/responses": {"input": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
}
"""Path -> what a description cannot say that there must be, as something else may be there instead."""


@schemathesis.hook
def map_case(_: schemathesis.HookContext, case: schemathesis.Case) -> schemathesis.Case:
    """Make two of three right requests such as get served: those of many random fields hardly ever do."""
    mode = case.meta.generation.mode if case.meta is not None else None
    if mode is schemathesis.GenerationMode.POSITIVE and isinstance(case.body, dict):
        digest = hashlib.sha256(repr(case.body).encode(errors="replace")).digest()
        if digest[0] % 3:
            asked = _ASKED.get(case.path, {})
            case.body = _with_contents(_with_few_fields(case.body, digest[1]) | asked)
    return case


def _with_few_fields(body: dict[str, Any], start: int) -> dict[str, Any]:
    """Many contradict each other."""
    optional = sorted(body.keys() - _REQUIRED)
    kept = _REQUIRED | {*(optional * 2)[start % max(len(optional), 1) :][:_KEPT]}
    few = {name: value for name, value in body.items() if name in kept}
    return {**few, "stream": True} if few.get("stream_options") else few


def _with_contents(body: dict[str, Any]) -> dict[str, Any]:
    """Neither a prompt nor a message may be empty, and `n` of them are work for all."""
    changed = dict(body)
    if "input" in body:
        changed.pop("prompt", None)
    elif "prompt" in body:
        changed["prompt"] = body["prompt"] or "Hi"
        changed.pop("messages", None)
    if isinstance(changed.get("messages"), list):
        changed["messages"] = [_as_message(message) for message in body["messages"]]
    if isinstance(body.get("n"), int):
        changed["n"] = min(body["n"], 3)
    return changed


def _as_message(message: Any) -> Any:
    """One of the user's; or a list of them, of several conversations."""
    if isinstance(message, list):
        return [_as_message(part) for part in message]
    text = message.get("content") if isinstance(message, dict) else None
    return {"role": "user", "content": text if isinstance(text, str) and text else "Hi"}


@schemathesis.check
def events_conformance(
    _: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """Each event is as described, and the last one is [DONE] if it should be."""
    if not response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        return
    frames = response.content.decode().split("\n\n")
    assert frames.pop() == "", "the stream ends within an event"
    texts = [frame.partition("data: ")[2] for frame in frames if not frame.startswith(":")]
    validator, ends_with_done = _stream(case.path, case.method)
    if ends_with_done:
        assert texts.pop() == "[DONE]", "the stream does not end with [DONE]"
    for text in texts:
        validator.validate(_as_described(case.path, json.loads(text)))
