"""The ids of responses and of their items: an item's id tells which response it belongs to."""

from __future__ import annotations

import re
import secrets

__all__ = ["input_item_id", "new_call_id", "new_response_id", "output_item_id", "response_of_item"]

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{48})[io][0-9]+")


def new_response_id() -> str:
    """It cannot be guessed, and is nobody's choice: responses are kept under it."""
    return f"resp_{secrets.token_hex(24)}"


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def input_item_id(kind: str, response_id: str, index: int) -> str:
    return f"{_PREFIXES[kind]}_{response_id.removeprefix('resp_')}i{index}"


def output_item_id(kind: str, response_id: str, index: int) -> str:
    return f"{_PREFIXES[kind]}_{response_id.removeprefix('resp_')}o{index}"


def response_of_item(item_id: str) -> str | None:
    """The id of the response that has this item; None if it is no id of ours."""
    match = _ITEM_ID.fullmatch(item_id)
    return None if match is None else f"resp_{match[1]}"
