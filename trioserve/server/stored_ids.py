"""Ids in paths, where some words that could be one are routes of their own."""

from __future__ import annotations

from werkzeug.routing import BaseConverter

__all__ = ["StoredId"]


class StoredId(BaseConverter):
    """A part of a path that is no such word: OPTIONS would else allow for those what is allowed for ids."""

    regex = "(?!(?:batch|compact|input_tokens|render)$)[^/]+"
