"""Responses that are whole: JSON, text, or nothing but a status."""

from __future__ import annotations

import msgspec
from quart import Response

__all__ = ["empty_reply", "json_reply", "text_reply"]

_encode = msgspec.json.Encoder().encode


def json_reply(content: object) -> Response:
    """`content` is an attrs object or plain data."""
    return Response(_encode(content), content_type="application/json")


def text_reply(text: str) -> Response:
    return Response(text, content_type="text/plain; charset=utf-8")


def empty_reply(status: int) -> Response:
    return Response(b"", status, content_type="text/plain; charset=utf-8")
