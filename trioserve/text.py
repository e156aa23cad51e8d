"""What counts as text."""

from __future__ import annotations

__all__ = ["is_unicode"]


def is_unicode(text: str) -> bool:
    """False for halves of characters (lone surrogates), which JSON can spell and no encoding holds."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
