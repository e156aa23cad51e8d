"""What a model is for, by its architecture and its other files; and what the user wants instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from trioserve.errors import InvalidConfigError, ModelNotSupportedError
from trioserve.models.registry import SPEECH

if TYPE_CHECKING:
    from trioserve.config import ModelConfig

__all__ = ["POOLING_ARCHITECTURES", "Purpose", "natural_purpose", "purpose_of"]

Purpose = Literal["generate", "embed", "classify", "token_classify"]

_SUFFIXES: dict[str, Purpose] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForMaskedLM": "embed",
    "ForTextEncoding": "embed",
    "EmbeddingModel": "embed",
    "Model": "embed",
}
"""End of an architecture's name -> purpose. A masked language model is an encoder with a head for training,
which is left out."""

POOLING_ARCHITECTURES = (
    "...Model",
    "...ForMaskedLM",
    "...ForSequenceClassification",
    "...ForTokenClassification",
)
"""For messages."""

_LEFT_OUT = ("LMHeadModel", "ForConditionalGenerationModel")
"""They end in Model, and generate."""


def natural_purpose(architecture: str) -> Purpose:
    """What models of this architecture are made for."""
    if architecture.endswith(_LEFT_OUT):
        return "generate"
    found = (purpose for suffix, purpose in _SUFFIXES.items() if architecture.endswith(suffix))
    return next(found, "generate")


def purpose_of(architecture: str, wanted: ModelConfig, *, embeds: bool, where: str) -> Purpose:
    """embeds: files of sentence-transformers say that it makes embeddings, whatever its architecture.

    Raises:
      InvalidConfigError: runner or convert ask for what it cannot be.
      ModelNotSupportedError: it does not generate, and convert keeps it from anything else.
    """
    natural = natural_purpose(architecture)
    if architecture in SPEECH:
        _check_hears(architecture, wanted)
        return "generate"
    if wanted.runner == "generate":
        _check_generates(natural, architecture, wanted)
        return "generate"
    if wanted.convert == "embed":
        return "embed"
    if wanted.convert == "classify":
        _check_classifies(natural, architecture)
        return natural
    if natural == "generate" and wanted.convert == "auto" and (embeds or wanted.runner == "pooling"):
        return "embed"
    if natural == "generate" and wanted.runner == "pooling":
        raise ModelNotSupportedError(
            f"{where} ({architecture}) generates; to pool what it makes of a text, convert must be auto or "
            f"embed, got {wanted.convert!r}."
        )
    return natural


def _check_hears(architecture: str, wanted: ModelConfig) -> None:
    for field, value, allowed in (
        ("runner", wanted.runner, {"auto", "generate"}),
        ("convert", wanted.convert, {"auto", "none"}),
    ):
        if value not in allowed:
            raise InvalidConfigError(
                f"{field} must be {' or '.join(sorted(allowed))} for {architecture}, which can be asked for "
                f"transcription, got {value!r}.",
                field=field,
            )


def _check_generates(natural: Purpose, architecture: str, wanted: ModelConfig) -> None:
    if natural != "generate":
        raise InvalidConfigError(
            f"runner must be auto or pooling for {architecture}, which can be asked for {natural}, "
            "got 'generate'.",
            field="runner",
        )
    if wanted.convert in {"embed", "classify"}:
        raise InvalidConfigError(
            f"convert must be auto or none with runner=generate, got {wanted.convert!r}.", field="convert"
        )


def _check_classifies(natural: Purpose, architecture: str) -> None:
    if natural not in {"classify", "token_classify"}:
        raise InvalidConfigError(
            f"convert must be auto, none or embed for {architecture}, which has no weights for classes "
            "(...ForSequenceClassification and ...ForTokenClassification have), got 'classify'.",
            field="convert",
        )
