"""The messages between a client and an engine core.

A message on the wire is one frame (`trioserve.link.framing`): a byte that says which class, then msgpack of
that attrs class. What is sent once per step is columnar: packed arrays in native byte order, one entry per
request, because 256 small objects cost fifty times more than four arrays.

    client                               engine core
      Hello  ──────────────────────────▶
             ◀──────────────────────────  Ready | Fatal
      Add, Abort, Utility  ────────────▶
             ◀──────────────────────────  StepOutputs, Refused, UtilityResult
      or, to a model that pools:
      AddPooling, Abort, Utility  ─────▶
             ◀──────────────────────────  PooledOutputs, Refused, UtilityResult
             ◀──────────────────────────  Fatal, then end of file
"""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from trioserve.audio_input import AudioInput
from trioserve.config import EngineConfig, ResolvedModel
from trioserve.core.stats import CoreStats
from trioserve.errors import TrioserveError
from trioserve.pooling_params import PoolingParams
from trioserve.sampling_params import SamplingParams
from trioserve.token_constraints import TokenConstraints

__all__ = [
    "PROTOCOL_VERSION",
    "Abort",
    "Add",
    "AddPooling",
    "CutOffError",
    "Fatal",
    "Hello",
    "LogprobColumns",
    "Message",
    "MessageError",
    "PooledOutputs",
    "Ready",
    "Refused",
    "StepOutputs",
    "Utility",
    "UtilityResult",
    "decode_message",
    "encode_message",
]

PROTOCOL_VERSION = 1


class MessageError(TrioserveError):
    """A frame is no message of this protocol: the other side is broken, or another version."""


class CutOffError(MessageError):
    """The stream ended inside a frame."""


@attrs.frozen(kw_only=True)
class Hello:
    """The client's first message: what the core is to be."""

    protocol: int
    version: str
    config: EngineConfig
    model: ResolvedModel


@attrs.frozen(kw_only=True)
class Ready:
    """The core's answer to `Hello`: the model is loaded and the cache allocated."""

    protocol: int
    version: str
    config_hash: str
    """Of the configuration as the core understood it; the client compares."""
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    load_seconds: float
    kernels: str
    """What computes the model, in words."""
    failed_adapters: dict[str, str] = attrs.field(factory=dict)
    """Key -> why it could not be loaded, of `EngineConfig.lora`; the core serves without these."""


@attrs.frozen(kw_only=True)
class Fatal:
    """The core cannot go on: its last message."""

    message: str
    traceback: str


@attrs.frozen(kw_only=True)
class Add:
    """Start a sequence. `params.n` is 1 and `params.max_tokens` is set: the frontend has seen to both."""

    request_id: int
    """Chosen by the client, never used twice on a connection."""
    prompt_token_ids: bytes
    """int32."""
    params: SamplingParams
    constraints: TokenConstraints
    seed: int
    streams: bool
    """False: nothing is sent before the end."""
    time_left: float | None
    """Seconds until the deadline of the request's scope; None if it has none."""
    priority: int = 0
    cache_salt: str | None = None
    lora: str | None = None
    """The key of its adapter, which has been loaded."""
    audio: AudioInput | None = None
    """Of a speech model's sequences."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids) // 4


@attrs.frozen(kw_only=True)
class AddPooling:
    """Pool a text. `params.task` is set."""

    request_id: int
    """As of `Add`."""
    prompt_token_ids: bytes
    """int32."""
    token_type_ids: bytes = b""
    """uint8 per token: which text of a pair it belongs to; empty: all 0."""
    params: PoolingParams
    time_left: float | None
    """As of `Add`."""
    priority: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids) // 4


@attrs.frozen(kw_only=True)
class Refused:
    """A sequence, or a text, is not run, because of what was asked for; nothing else is sent of it."""

    request_id: int
    message: str
    """Names the field, the value and what is allowed."""
    parameter: str | None


@attrs.frozen
class Abort:
    """Stop these sequences and free their blocks before the next step; unknown ids are fine. Each id is
    answered once, in `StepOutputs.freed`."""

    request_ids: list[int]


@attrs.frozen(kw_only=True)
class Utility:
    """Call a method of the core by name, e.g. reset_prefix_cache."""

    call_id: int
    method: str
    args: list[Any]


@attrs.frozen(kw_only=True)
class UtilityResult:
    call_id: int
    result: Any = None
    error: str | None = None


@attrs.frozen(kw_only=True)
class LogprobColumns:
    """Of tokens, in their order."""

    widths: bytes
    """int32 per token: how many entries it has below, 0 where none were asked for."""
    token_ids: bytes
    """int32."""
    logprobs: bytes
    """float32."""
    ranks: bytes
    """int32."""


@attrs.frozen(kw_only=True)
class StepOutputs:
    """What one step gave, one entry per request that has something to report; may be empty (stats only)."""

    request_ids: bytes
    """int64."""
    num_tokens: bytes
    """int32 per request: how many of `token_ids` are its own."""
    token_ids: bytes
    """int32, all requests' tokens in order."""
    finish_reasons: bytes
    """uint8 per request: `FinishReason`, 0 while it runs."""
    stop_token_ids: bytes
    """int32 per request: the stop token that ended it, -1 where none did (EOS is none), -2 where its grammar
    was complete, so that the last token is text."""
    num_cached_tokens: bytes
    """int32 per request: prompt tokens found in the prefix cache."""
    logprobs: LogprobColumns | None
    """Of `token_ids`."""
    num_prompt_logprobs: bytes
    """int32 per request: how many rows of `prompt_logprobs` are its own; empty if there are none at all."""
    prompt_logprobs: LogprobColumns | None
    """Of prompt positions from the second on, each request's in order, in as many parts as it has steps."""
    stats: CoreStats
    freed: bytes = b""
    """int64: ids of an `Abort` that hold nothing in the core any more, or never did. Nothing else is sent of
    them. Sent as soon as it is so: at once, or when the step that computes them is back."""


@attrs.frozen(kw_only=True)
class PooledOutputs:
    """What a step of a model that pools gave, one entry per text that has ended; may be empty."""

    request_ids: bytes
    """int64."""
    finish_reasons: bytes
    """uint8 per text: `FinishReason`; STOP where there is a result."""
    num_rows: bytes
    """int32 per text: one per token, or -1 where there is one result for the whole text."""
    num_values: bytes
    """int32 per text: how many of `values` are its own, in all of its rows."""
    values: bytes
    """float32, all texts' values in order."""
    stats: CoreStats
    freed: bytes = b""
    """As of `StepOutputs`."""


Message = (
    Hello
    | Ready
    | Fatal
    | Add
    | Abort
    | Utility
    | UtilityResult
    | StepOutputs
    | Refused
    | AddPooling
    | PooledOutputs
)

# The position is the type byte: append only.
_CLASSES: tuple[type[Message], ...] = (
    Hello,
    Ready,
    Fatal,
    Add,
    Abort,
    Utility,
    UtilityResult,
    StepOutputs,
    Refused,
    AddPooling,
    PooledOutputs,
)
_CODES = {kind: bytes([code]) for code, kind in enumerate(_CLASSES)}
_encoder = msgspec.msgpack.Encoder()
_decoders = tuple(msgspec.msgpack.Decoder(kind) for kind in _CLASSES)


def encode_message(message: Message) -> bytes:
    """The body of a frame."""
    return _CODES[type(message)] + _encoder.encode(message)


def decode_message(frame: bytes) -> Message:
    """The message of a frame's body.

    Raises:
      MessageError: it is none.
    """
    if not frame or frame[0] >= len(_decoders):
        raise MessageError(f"unknown message type {frame[:1]!r}")
    try:
        return _decoders[frame[0]].decode(memoryview(frame)[1:])
    except (msgspec.MsgspecError, TrioserveError, RecursionError) as error:
        raise MessageError(f"{_CLASSES[frame[0]].__name__}: {error}") from error
