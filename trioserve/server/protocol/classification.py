"""POST /classify: the request and the answer."""

from __future__ import annotations

import attrs

from trioserve.server.protocol.pooling_fields import InputFields, PromptUsage

__all__ = ["Classification", "ClassificationList", "ClassifyRequest"]


@attrs.frozen(kw_only=True)
class ClassifyRequest(InputFields):
    """`use_activation` false: raw values instead of probabilities."""


@attrs.frozen(kw_only=True)
class Classification:
    index: int
    label: str | None
    """The likeliest; None where the model's files name none."""
    probs: list[float]
    num_classes: int


@attrs.frozen(kw_only=True)
class ClassificationList:
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PromptUsage
