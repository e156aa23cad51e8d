"""How a client is told that its grammar cannot be used."""

from __future__ import annotations

from trioserve.errors import InvalidRequestError

__all__ = ["refusal", "shortened"]

_MAX_REASON_LENGTH = 300


def shortened(reason: str) -> str:
    """The gist of llguidance's text, which may quote the whole grammar: its beginning and its end."""
    text = " ".join(reason.split("\n<", 1)[0].split())
    if text.startswith("NoExtension"):
        return "nothing matches it."
    if len(text) <= _MAX_REASON_LENGTH:
        return text
    half = _MAX_REASON_LENGTH // 2
    return f"{text[:half]} ... {text[-half:]}"


def refusal(reason: str) -> InvalidRequestError:
    """The request's fault: what it asks for is no valid grammar, not supported, or too complex."""
    return InvalidRequestError(
        f"structured_outputs cannot be used: {shortened(reason)}", parameter="structured_outputs"
    )
