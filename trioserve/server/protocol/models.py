"""What `GET /v1/models` answers."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.tasks import Task

__all__ = ["ModelCard", "ModelList"]


@attrs.frozen(kw_only=True)
class ModelCard:
    """OpenAI's four keys, and what clients of vLLM look for."""

    id: str
    created: int
    """Unix time."""
    object: str = "model"
    owned_by: str = "trioserve"
    root: str
    """What was given as the model: a packaged name, path or hub id. Of a LoRA adapter: its path, as it was
    given."""
    parent: str | None = None
    """Of a LoRA adapter: the model's name."""
    max_model_len: int
    tasks: Sequence[Task]
    """What it can be asked for."""


@attrs.frozen
class ModelList:
    data: list[ModelCard]
    object: str = "list"
