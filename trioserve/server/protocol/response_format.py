"""`response_format`: OpenAI's way of saying what form the output must have."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from trioserve.errors import InvalidRequestError
from trioserve.server.protocol.tool_schemas import can_be_closed
from trioserve.structured_outputs import StructuredOutputsParams

__all__ = ["JsonSchemaFormat", "ResponseFormat"]


@attrs.frozen(kw_only=True)
class JsonSchemaFormat:
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    """Without an effect: a schema is always kept to, and objects have the properties that it names, unless it
    allows others."""

    def __attrs_post_init__(self) -> None:
        if self.schema is None:
            raise InvalidRequestError("A JSON schema format needs a schema.", parameter="schema")


@attrs.frozen(kw_only=True)
class ResponseFormat:
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    """Of a structural tag, with `triggers`; or else its `format`."""
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        if self.type == "json_schema" and self.json_schema is None:
            raise InvalidRequestError('The type "json_schema" needs a json_schema.', parameter="json_schema")
        if self.type == "structural_tag" and self.structures is None and self.format is None:
            raise InvalidRequestError(
                'The type "structural_tag" needs structures and triggers, or a format.', parameter="format"
            )

    @property
    def constrains(self) -> bool:
        """False for plain text."""
        return self.type != "text"

    def params(self) -> StructuredOutputsParams | None:
        """The same for the engine; None for plain text."""
        match self.type:
            case "json_object":
                return StructuredOutputsParams(json_object=True)
            case "json_schema":
                assert self.json_schema is not None
                schema = self.json_schema.schema or {}
                closes = can_be_closed(schema)
                return StructuredOutputsParams(json=schema, disable_additional_properties=closes)
            case "structural_tag":
                return StructuredOutputsParams(structural_tag=self._structural_tag())
            case _:
                return None

    def _structural_tag(self) -> dict[str, Any]:
        if self.format is not None:
            return {"type": self.type, "format": self.format}
        return {"type": self.type, "structures": self.structures, "triggers": self.triggers}
