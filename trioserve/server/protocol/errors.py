"""OpenAI's error object."""

from __future__ import annotations

import attrs

__all__ = ["ErrorDetail", "ErrorResponse"]


@attrs.frozen
class ErrorDetail:
    message: str
    type: str
    param: str | None = None
    """The field at fault, as a path: `messages[0].content`."""
    code: str | None = None


@attrs.frozen
class ErrorResponse:
    error: ErrorDetail
