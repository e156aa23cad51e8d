"""What is said between two commits."""

from __future__ import annotations

import uuid

import attrs

__all__ = ["Item", "make_id"]


def make_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


@attrs.define(eq=False)
class Item:
    """One utterance, or several: from one commit to the next."""

    id: str = attrs.field(init=False, factory=lambda: make_id("item"))
    seconds: float = attrs.field(init=False, default=0.0)
    """Of audio that came."""
    language: str | None = attrs.field(init=False, default=None)
    """As it was heard."""
    is_over: bool = attrs.field(init=False, default=False)
    """It has failed, or was cleared: what is left of it is not listened to."""
    num_prompt_tokens: int = attrs.field(init=False, default=0)
    num_generation_tokens: int = attrs.field(init=False, default=0)
    _texts: list[str] = attrs.field(init=False, factory=list)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def say(self, text: str) -> str:
        """What is new of the text. The space before its first word is the model's way of writing."""
        if not self._texts:
            text = text.lstrip()
        if text:
            self._texts.append(text)
        return text
