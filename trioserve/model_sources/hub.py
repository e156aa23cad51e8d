"""Models from a Hugging Face hub.

`huggingface_hub` does the work, in a helper process: it keeps connections and threads of its own, which
must not stay behind here, and its downloads can so be cancelled.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from trioserve.model_sources.helper_process import call_helper

if TYPE_CHECKING:
    from trioserve.model_sources.progress import Progress

__all__ = ["HubReference", "fetch_model", "fetch_tokenizer"]


@attrs.frozen
class HubReference:
    """What is to be fetched."""

    repo_id: str
    revision: str | None
    """A branch, tag or commit; None: the hub's default."""
    token: str | None = attrs.field(repr=False)
    """None: that of `hf auth login`, if there is one."""
    pools: bool = False
    """It is wanted for runner=pooling, for which models will do that cannot be served otherwise."""


def fetch_model(reference: HubReference, progress: Progress) -> Path:
    """A directory with the model's files. A model that cannot be served is refused by its config.json alone.

    Raises:
      ModelSourceError: the hub does not have it, does not give it, or cannot be reached.
      ModelNotSupportedError: see `check_servable`.
    """
    return _fetch("model", reference, progress)


def fetch_tokenizer(reference: HubReference, progress: Progress) -> Path:
    """A directory with the tokenizer's files.

    Raises:
      ModelSourceError: the hub does not have it, does not give it, or cannot be reached.
    """
    return _fetch("tokenizer", reference, progress)


def _fetch(kind: str, reference: HubReference, progress: Progress) -> Path:
    answer = call_helper(
        "trioserve.model_sources.fetch_from_hub",
        {"kind": kind, **attrs.asdict(reference)},
        shows_progress=progress.visible,
    )
    return Path(answer["directory"])
