"""Serve language models with structured concurrency.

What lies deeper may import what lies further down, never up (import-linter holds this, in pyproject.toml):

    cli
    batch
    server | llm
    llm_pooling | llm_speech
    llm_engine
    portal | async_llm
    frontend | model_sources
    link
    core
    worker
    models
    trioserve_kernels
    args, config, sampling_params, outputs, errors, observability, ...

Nothing but worker, models and kernels imports torch, so a process that only serves HTTP never does.

The public names are imported when they are first asked for: an engine core's process, or a helper's, imports
this package too, and has no use for most of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioserve.args import EngineArgs as EngineArgs
    from trioserve.async_llm import AsyncLLM as AsyncLLM
    from trioserve.audio.limits import AudioLimits as AudioLimits
    from trioserve.audio.speech import Speech as Speech
    from trioserve.beam_search_params import BeamSearchParams as BeamSearchParams
    from trioserve.errors import ClosedError as ClosedError
    from trioserve.errors import EngineDeadError as EngineDeadError
    from trioserve.errors import EngineGenerateError as EngineGenerateError
    from trioserve.errors import EngineRestartingError as EngineRestartingError
    from trioserve.errors import EngineStartError as EngineStartError
    from trioserve.errors import InvalidConfigError as InvalidConfigError
    from trioserve.errors import InvalidRequestError as InvalidRequestError
    from trioserve.errors import LoRANotFoundError as LoRANotFoundError
    from trioserve.errors import ModelNotSupportedError as ModelNotSupportedError
    from trioserve.errors import ModelSourceError as ModelSourceError
    from trioserve.errors import OverloadedError as OverloadedError
    from trioserve.errors import PromptTooLongError as PromptTooLongError
    from trioserve.errors import TrioserveError as TrioserveError
    from trioserve.errors import UnfinishedError as UnfinishedError
    from trioserve.frontend.prompts import AudioPrompt as AudioPrompt
    from trioserve.frontend.prompts import PairPrompt as PairPrompt
    from trioserve.frontend.prompts import TextPrompt as TextPrompt
    from trioserve.frontend.prompts import TokensPrompt as TokensPrompt
    from trioserve.frontend.request_stream import RequestStream as RequestStream
    from trioserve.frontend.streaming_input import StreamingInput as StreamingInput
    from trioserve.frontend.transcription import TranscriptionStream as TranscriptionStream
    from trioserve.frontend.transcription_outputs import SpeechSegment as SpeechSegment
    from trioserve.frontend.transcription_outputs import SpeechWord as SpeechWord
    from trioserve.frontend.transcription_outputs import Transcription as Transcription
    from trioserve.frontend.transcription_params import TranscriptionParams as TranscriptionParams
    from trioserve.llm import LLM as LLM
    from trioserve.llm_engine import LLMEngine as LLMEngine
    from trioserve.lora_request import LoRARequest as LoRARequest
    from trioserve.outputs import BeamSearchOutput as BeamSearchOutput
    from trioserve.outputs import BeamSearchSequence as BeamSearchSequence
    from trioserve.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from trioserve.outputs import CompletionOutput as CompletionOutput
    from trioserve.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from trioserve.outputs import FinishReason as FinishReason
    from trioserve.outputs import FlatLogprobs as FlatLogprobs
    from trioserve.outputs import Logprob as Logprob
    from trioserve.outputs import PoolingRequestOutput as PoolingRequestOutput
    from trioserve.outputs import RequestOutput as RequestOutput
    from trioserve.outputs import ScoringRequestOutput as ScoringRequestOutput
    from trioserve.pooling_params import PoolingParams as PoolingParams
    from trioserve.sampling_params import RepetitionDetection as RepetitionDetection
    from trioserve.sampling_params import RequestOutputKind as RequestOutputKind
    from trioserve.sampling_params import SamplingParams as SamplingParams
    from trioserve.server_args import ServerArgs as ServerArgs
    from trioserve.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
from trioserve.version import __version__ as __version__

_HOMES = {
    "trioserve.args": ("EngineArgs",),
    "trioserve.async_llm": ("AsyncLLM",),
    "trioserve.audio.limits": ("AudioLimits",),
    "trioserve.audio.speech": ("Speech",),
    "trioserve.beam_search_params": ("BeamSearchParams",),
    "trioserve.errors": (
        "ClosedError",
        "EngineDeadError",
        "EngineGenerateError",
        "EngineRestartingError",
        "EngineStartError",
        "InvalidConfigError",
        "InvalidRequestError",
        "LoRANotFoundError",
        "ModelNotSupportedError",
        "ModelSourceError",
        "OverloadedError",
        "PromptTooLongError",
        "TrioserveError",
        "UnfinishedError",
    ),
    "trioserve.frontend.prompts": (
        "AudioPrompt",
        "PairPrompt",
        "TextPrompt",
        "TokensPrompt",
    ),
    "trioserve.frontend.request_stream": ("RequestStream",),
    "trioserve.frontend.streaming_input": ("StreamingInput",),
    "trioserve.frontend.transcription": ("TranscriptionStream",),
    "trioserve.frontend.transcription_outputs": (
        "SpeechSegment",
        "SpeechWord",
        "Transcription",
    ),
    "trioserve.frontend.transcription_params": ("TranscriptionParams",),
    "trioserve.llm": ("LLM",),
    "trioserve.llm_engine": ("LLMEngine",),
    "trioserve.lora_request": ("LoRARequest",),
    "trioserve.outputs": (
        "BeamSearchOutput",
        "BeamSearchSequence",
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbeddingRequestOutput",
        "FinishReason",
        "FlatLogprobs",
        "Logprob",
        "PoolingRequestOutput",
        "RequestOutput",
        "ScoringRequestOutput",
    ),
    "trioserve.pooling_params": ("PoolingParams",),
    "trioserve.sampling_params": (
        "RepetitionDetection",
        "RequestOutputKind",
        "SamplingParams",
    ),
    "trioserve.server_args": ("ServerArgs",),
    "trioserve.structured_outputs": ("StructuredOutputsParams",),
}
"""Module -> its public names."""

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]  # noqa: PLE0604 - they are strings

if not TYPE_CHECKING:  # else any name would do

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(importlib.import_module(_HOME_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
