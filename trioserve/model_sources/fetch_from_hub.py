"""`python -m trioserve.model_sources.fetch_from_hub`: the helper process that asks a Hugging Face hub.

HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and the other settings of `huggingface_hub` hold. With a whole snapshot
in that library's cache no network is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from trioserve.errors import ModelSourceError
from trioserve.model_sources.helper_process import run_helper
from trioserve.model_sources.json_files import read_json
from trioserve.model_sources.purposes import natural_purpose
from trioserve.model_sources.servable import architecture_of, check_servable

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["fetch"]

_CONFIG = ("config.json", "modules.json")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template*")
_SENTENCES = ("sentence_*_config.json", "config_sentence_transformers.json")
_MODEL = (
    *_CONFIG,
    *_TOKENIZER,
    *_SENTENCES,
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
)
_MODULES = ("[0-9]_*/config.json", "[0-9]_*/model.safetensors")
"""What follows a model of sentence-transformers, in folders such as 1_Pooling."""
_IGNORED = ("*/*", "consolidated*")
"""Other formats in subfolders, and the duplicate that Mistral's repositories hold."""


def fetch(request: dict[str, Any]) -> dict[str, str]:
    """`kind` (model or tokenizer), `repo_id`, `revision`, `token`, `pools` -> `directory`.

    Raises:
      ModelSourceError: the hub does not have it, does not give it, or cannot be reached.
      ModelNotSupportedError: see `check_servable`.
    """
    kind, pools = request.pop("kind"), request.pop("pools")
    is_tokenizer = kind == "tokenizer"
    directory = _snapshot(request, _TOKENIZER) if is_tokenizer else _fetch_model(request, pools=pools)
    return {"directory": str(directory)}


def _fetch_model(reference: dict[str, Any], *, pools: bool) -> Path:
    repo_id = reference["repo_id"]
    first = _snapshot(reference, _CONFIG)
    if not (first / "config.json").is_file():
        raise ModelSourceError(f"{repo_id} on the hub has no config.json: it is not a model to serve.")
    where, config = f"{repo_id} on the hub", read_json(first / "config.json")
    has_modules = (first / "modules.json").is_file()
    if natural_purpose(architecture_of(config, where=where)) == "generate" and not (pools or has_modules):
        check_servable(config, where=where)
    # The directory is named after the commit: the weights come from where the config came from.
    reference = {**reference, "revision": first.name}
    if has_modules:
        _snapshot(reference, _MODULES, ignored=())
    return _snapshot(reference, _MODEL)


def _snapshot(reference: dict[str, Any], patterns: Sequence[str], ignored: Sequence[str] = _IGNORED) -> Path:
    try:
        directory = snapshot_download(
            **reference,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
            library_name="trioserve",
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx2.HTTPError, OSError) as error:
        raise ModelSourceError(
            f"There is no directory {reference['repo_id']!r}, and from the hub it cannot be fetched: "
            f"{_reason(reference, error)}"
        ) from error
    return Path(directory)


def _reason(reference: dict[str, Any], error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return "access to it is gated. Accept its terms on the hub and give a token (--hf-token)."
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such model, or it is private and needs a token (--hf-token)."
    if isinstance(error, RevisionNotFoundError):
        return f"it has no revision {reference['revision']!r}."
    if isinstance(error, LocalEntryNotFoundError):
        return f"it is not (wholly) in the local cache, and the hub cannot be asked. {error}"
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(run_helper(fetch))
