"""Calls that the model is free to make, held to their schemas once it makes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.parsers.call_format import fill_in
from trioserve.server.protocol.tool_schemas import arguments_schema, closes_objects
from trioserve.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.parsers.call_format import StrictForm
    from trioserve.server.protocol.tools import FunctionDefinition

__all__ = ["form_or_calls", "strict_calls"]


def strict_calls(form: StrictForm, functions: Sequence[FunctionDefinition]) -> StructuredOutputsParams | None:
    """Of an answer that is text and calls, where the arguments of strict functions keep to their schema; None
    if none is strict.

    Raises:
      InvalidRequestError: the schemas are too large or too deep; of `structural_tag`.
    """
    strict = [function for function in functions if function.strict]
    if not strict:
        return None
    # After a trigger that all calls have there must be one of the calls that are listed.
    held = strict if "NAME" in form.trigger else functions
    triggers = dict.fromkeys(fill_in(form.trigger, function.name) for function in held)
    tags = {"type": "triggered_tags", "triggers": list(triggers), "tags": _tags(form, held)}
    return _tagged(tags, functions)


def form_or_calls(
    wanted: StructuredOutputsParams, form: StrictForm | None, functions: Sequence[FunctionDefinition]
) -> StructuredOutputsParams:
    """Of an answer that is either what is wanted, or calls. Where that cannot be said, what is wanted."""
    if form is None or form.separator is None or not (wanted.json or wanted.json_object):
        return wanted
    calls = {
        "type": "tags_with_separator",
        "separator": form.separator,
        "tags": _tags(form, functions),
        "at_least_one": True,
    }
    schema = json.loads(wanted.json) if wanted.json else {"type": "object"}
    either = {"type": "or", "elements": [{"type": "json_schema", "json_schema": schema}, calls]}
    return attrs.evolve(wanted, json=None, json_object=False, structural_tag=_tag(either))


def _tags(form: StrictForm, functions: Sequence[FunctionDefinition]) -> list[dict[str, Any]]:
    return [
        {
            "type": "tag",
            "begin": fill_in(form.begin, function.name),
            "content": {"type": "json_schema", "json_schema": _schema(function)},
            "end": form.end,
        }
        for function in functions
    ]


def _schema(function: FunctionDefinition) -> dict[str, Any]:
    return arguments_schema(function) if function.strict else {"type": "object"}


def _tagged(tags: dict[str, Any], functions: Sequence[FunctionDefinition]) -> StructuredOutputsParams:
    return StructuredOutputsParams(
        structural_tag=_tag(tags), disable_additional_properties=closes_objects(functions)
    )


def _tag(form: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
