"""Fields that would change the answer and are not served: refused by name, never ignored."""

from __future__ import annotations

from typing import Any

import attrs

__all__ = ["CHAT_REFUSALS", "COMPLETION_REFUSALS", "HARMLESS", "Refusal"]


@attrs.frozen
class Refusal:
    field: str
    allowed: str
    """In words, as in "must be null"."""
    values: tuple[Any, ...] = ()
    """All that is allowed beside null, which always means "not given"."""

    def allows(self, value: Any) -> bool:
        # JSON tells false from 0, Python does not.
        return value is None or any(type(value) is type(known) and value == known for known in self.values)

    def sentence(self, value: Any) -> str:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return f"{self.field} must be {self.allowed}, got {shown}: anything else is not supported."


def _null(*fields: str) -> tuple[Refusal, ...]:
    return tuple(Refusal(field, "null") for field in fields)


def _empty(*fields: str) -> tuple[Refusal, ...]:
    return tuple(Refusal(field, "null or empty", ([], {}, "")) for field in fields)


def _false(*fields: str) -> tuple[Refusal, ...]:
    return tuple(Refusal(field, "false or null", (False,)) for field in fields)


def _true(*fields: str) -> tuple[Refusal, ...]:
    return tuple(Refusal(field, "true or null", (True,)) for field in fields)


_BOTH = (
    *_null("guided_choice", "guided_grammar", "guided_json", "guided_regex"),
    *_empty("kv_transfer_params", "logits_processors"),
    *_true("spaces_between_special_tokens"),
)

CHAT_REFUSALS = (
    *_BOTH,
    *_null("audio", "moderation", "web_search_options"),
    *_false("store"),
    Refusal("modalities", 'null or ["text"]', (["text"],)),
)

COMPLETION_REFUSALS = (*_BOTH, *_null("prompt_embeds"))

HARMLESS = frozenset(
    {
        "media_io_kwargs",
        "metadata",
        "mm_processor_kwargs",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
"""Known, and without an effect on the answer."""
