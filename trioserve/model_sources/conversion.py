"""GGUF files and directories of CTranslate2 become Hugging Face directories in the cache, once, in a process
of their own.

That process imports numpy, which this one does not; neither imports torch.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from trioserve.errors import ModelSourceError
from trioserve.model_sources.cache import cache_root, publish_directory
from trioserve.model_sources.ctranslate2_file import MODEL_FILE
from trioserve.model_sources.digests import file_digest
from trioserve.model_sources.gguf_architectures import architecture_of
from trioserve.model_sources.gguf_header import read_header
from trioserve.model_sources.helper_process import call_helper
from trioserve.model_sources.json_files import read_json
from trioserve.model_sources.quantized import BLOCK_TYPES, rounded_types
from trioserve.model_sources.servable import check_architecture

if TYPE_CHECKING:
    from pathlib import Path

    from trioserve.model_sources.progress import Progress

__all__ = ["convert_ctranslate2", "convert_gguf"]

_FORMAT = 3
"""Counts up when the same file would be converted into something else."""

_CTRANSLATE2_FORMAT = 1
"""Likewise."""

_CTRANSLATE2_FILES = (MODEL_FILE, "config.json", "tokenizer.json")


def convert_gguf(path: Path, progress: Progress) -> Path:
    """A Hugging Face directory with the file's model, from the cache if it is there. Quantized matrices stay
    what they are (`convert_gguf.convert`).

    Raises:
      ModelSourceError: the file cannot be read, or the conversion failed.
      ModelNotSupportedError: the file's architecture, vocabulary or quantization is not supported.
    """
    target = cache_root() / "converted" / f"{file_digest(path, progress)}-v{_FORMAT}"
    if target.is_dir():
        return target
    architecture = architecture_of(read_header(path), where=str(path))
    check_architecture(architecture.name, where=str(path))
    progress.note(f"Converting {path.name}, once.")
    with publish_directory(target) as partial:
        call_helper("trioserve.model_sources.convert_gguf", {"source": str(path), "target": str(partial)})
    if rounded := rounded_types(read_json(target / "config.json")):
        progress.note(
            f"The matrices that it has in {', '.join(rounded)} were rounded to bfloat16. Served as they are: "
            f"{', '.join(BLOCK_TYPES)}."
        )
    return target


def convert_ctranslate2(directory: Path, progress: Progress) -> Path:
    """A Hugging Face directory with the Whisper model of a directory in CTranslate2's layout, from the cache
    if it is there (`convert_ctranslate2.convert`).

    Raises:
      ModelSourceError: a file is missing or damaged, or the conversion failed.
      ModelNotSupportedError: it is no Whisper model, or it is quantized.
    """
    missing = [name for name in _CTRANSLATE2_FILES if not (directory / name).is_file()]
    if missing:
        raise ModelSourceError(
            f"{directory} has {MODEL_FILE}, as CTranslate2's models have, and no {', '.join(missing)}."
        )
    digests = "".join(file_digest(directory / name, progress) for name in _CTRANSLATE2_FILES)
    digest = hashlib.sha256(digests.encode()).hexdigest()
    target = cache_root() / "converted" / f"{digest}-ctranslate2-v{_CTRANSLATE2_FORMAT}"
    if not target.is_dir():
        progress.note(f"Converting {directory.name} from CTranslate2's layout, once.")
        with publish_directory(target) as partial:
            request = {"source": str(directory), "target": str(partial)}
            call_helper("trioserve.model_sources.convert_ctranslate2", request)
    return target
