"""Every error trioserve raises on purpose, sorted by whose fault it is.

TrioserveError
├─ InvalidRequestError   the request is wrong; sending it again changes nothing   (HTTP 4xx)
│  ├─ PromptTooLongError  it is longer than the model's context
│  └─ LoRANotFoundError   there is no such LoRA adapter                            (HTTP 404)
├─ InvalidConfigError    an argument, flag or config file is wrong
├─ ModelSourceError      the model could not be found, fetched or verified
├─ ModelNotSupportedError  the model was found, and cannot be served
├─ EngineStartError      the engine core did not come up
├─ EngineDeadError       the engine core is gone; none of its requests can succeed (HTTP 500)
├─ EngineGenerateError   this one request failed inside the engine                 (HTTP 500)
│  └─ UnfinishedError     it was aborted, its deadline passed, or it failed
├─ OverloadedError       the engine takes no more at present; later it may       (HTTP 503)
│  └─ EngineRestartingError  it died, and the next one is not ready yet          (HTTP 503)
└─ ClosedError           the LLM was used after it was closed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioserve.outputs import FinishReason

__all__ = [
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
]


class TrioserveError(Exception):
    """Base of all the errors below."""


class InvalidRequestError(TrioserveError, ValueError):
    """The request cannot be served as it is: the message names the field, the value and what is allowed.

    Only this class (never a bare ValueError) becomes a client error over HTTP.
    """

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class PromptTooLongError(InvalidRequestError):
    """Prompt and output together do not fit into the model's context."""

    def __init__(self, message: str) -> None:
        super().__init__(message, parameter="prompt")


class LoRANotFoundError(InvalidRequestError):
    """No adapter is loaded under this name, or there is none in this directory."""

    def __init__(self, message: str) -> None:
        super().__init__(message, parameter="lora_request")


class InvalidConfigError(TrioserveError, ValueError):
    """A configuration value is wrong: the message names the field, the value and what is allowed."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class ModelSourceError(TrioserveError):
    """The model could not be found, fetched or verified; the message says what was tried."""


class ModelNotSupportedError(TrioserveError, ValueError):
    """The model was found and cannot be served; the message says what it is and what is supported."""


class EngineStartError(TrioserveError, RuntimeError):
    """The engine core did not become ready; the message carries the root cause from its side."""


class EngineDeadError(TrioserveError, RuntimeError):
    """The engine core ended while it was needed. No request on it can succeed any more."""


class EngineGenerateError(TrioserveError, RuntimeError):
    """One request failed inside the engine core; the engine and the other requests go on."""


class UnfinishedError(EngineGenerateError):
    """What was asked for has no result, or a part of one: `reason` is ABORT, DEADLINE or ERROR."""

    def __init__(self, message: str, *, reason: FinishReason) -> None:
        super().__init__(message)
        self.reason = reason


class OverloadedError(TrioserveError, RuntimeError):
    """The engine takes no more at present; the same request may succeed later."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        """`retry_after`: seconds after which it may be worth trying again."""
        super().__init__(message)
        self.retry_after = retry_after


class EngineRestartingError(OverloadedError):
    """The engine core has died, and its successor is not ready yet."""


class ClosedError(TrioserveError, RuntimeError):
    """The object was closed (or not yet opened) when it was used."""
