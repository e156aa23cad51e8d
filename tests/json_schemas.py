"""Two hundred JSON schemas to generate by, and some that have to be refused; `data/json_schemas.json`.

The first half are the common keywords of the JSON Schema test suite, one or two at a time; then come
documents, and from "tool ..." on definitions of tools as agents have them.
"""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema

_DATA = json.loads((Path(__file__).parent / "data" / "json_schemas.json").read_text())

ACCEPTED: dict[str, Any] = _DATA["accepted"]
"""Schemas by name."""

REFUSED: dict[str, Any] = _DATA["refused"]
"""Not expressible, contradicting, or no schemas."""

_formats = jsonschema.FormatChecker(formats=["date", "email", "ipv4", "ipv6", "uuid"])


@_formats.checks("date-time", raises=ValueError)
def _is_date_time(value: object) -> bool:
    # RFC 3339 has leap seconds, and more digits of a second than datetime.
    text = re.sub(r":60(?=\D)", ":59", re.sub(r"(\.\d{1,6})\d*", r"\1", str(value)))
    return datetime.datetime.fromisoformat(text.upper()).tzinfo is not None


@_formats.checks("time", raises=ValueError)
def _is_time(value: object) -> bool:
    return _is_date_time(f"2000-01-01T{value}")


@_formats.checks("duration")
def _is_duration(value: object) -> bool:
    date, time = r"(?:\d+Y)?(?:\d+M)?(?:\d+W)?(?:\d+D)?", r"(?:T(?=\d)(?:\d+H)?(?:\d+M)?(?:\d+S)?)?"
    return re.fullmatch(rf"P(?=[\dT]){date}{time}", str(value)) is not None


@_formats.checks("hostname")
def _is_hostname(value: object) -> bool:
    label = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    return re.fullmatch(rf"{label}(?:\.{label})*", str(value)) is not None


@_formats.checks("uri", raises=ValueError)
def _is_uri(value: object) -> bool:
    return bool(urlsplit(str(value)).scheme)


def assert_valid(text: str, schema: Any) -> None:
    """The text is JSON, and the schema's, formats included."""
    validator = jsonschema.Draft202012Validator(schema, format_checker=_formats)
    errors = [error.message for error in validator.iter_errors(json.loads(text))]
    assert not errors, (errors, text)
