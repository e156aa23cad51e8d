"""Custom logits processors: code of yours that changes logits before a token is drawn.

Write a class like `LogitsProcessor` and name it in `logits_processors` ("package.module:Class"), or have your
package bring it by an entry point:

    [project.entry-points."trioserve.logits_processors"]
    no_shouting = "my_package.processors:NoShouting"

It runs in the engine core's process. What it wants to know of a request comes in
`SamplingParams.extra_args`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from trioserve.errors import InvalidConfigError
from trioserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import torch

    from trioserve.worker.rows import Row

__all__ = [
    "ENTRY_POINT_GROUP",
    "LogitsProcessor",
    "LogitsRow",
    "ProcessorContext",
    "apply_processors",
    "load_processors",
]

ENTRY_POINT_GROUP = "trioserve.logits_processors"


@attrs.frozen(kw_only=True)
class ProcessorContext:
    """What a processor learns when it is made."""

    vocab_size: int
    max_num_seqs: int
    """Sequences per step; speculation gives a sequence several rows."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]


@attrs.frozen(eq=False, kw_only=True)
class LogitsRow:
    """Whose token a row of the logits is about. Only to be read, and only until `apply` returns."""

    request_id: int
    """The same in all steps of one sequence, and never another's."""
    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """All output before this row's token. With speculation some of it is guessed, and may turn out to be
    something else in the next step: derive what you do from this, not from calls before."""


class LogitsProcessor(Protocol):
    """One object per engine core, for all its requests.

    An exception from `apply` ends the engine core with all its requests: refuse what you cannot process in
    `validate_params`.
    """

    def __init__(self, context: ProcessorContext) -> None:
        """Called once, when the engine core starts."""
        ...

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Called for each new request, also while `apply` runs in another thread; has to be quick.

        Raises:
          InvalidRequestError: this request cannot be served; its message goes to the client.
        """
        ...

    def is_argmax_invariant(self) -> bool:
        """True: the most likely token stays the most likely. Then it is not asked where all are greedy."""
        ...

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
        """Change the logits of a step, in place or not, and return them.

        logits: fp32 [R, vocab_size], barred tokens are -inf; rows: R, in the same order. What a row becomes
        must not depend on the other rows, or a seed's output would depend on who else is served. Tokens that
        a grammar or `allowed_token_ids` bars are barred again afterwards; a row without a finite logit ends
        its request with an error.
        """
        ...


def load_processors(names: Sequence[str], context: ProcessorContext) -> list[LogitsProcessor]:
    """One of each class: those of installed packages by name, then those of `names` ("module:Class").

    Raises:
      InvalidConfigError: one cannot be loaded, is no class of the right shape, or cannot be made.
    """
    classes: dict[type[LogitsProcessor], str] = {}  # a dict, as one may be named twice
    for name, load in _sources(names):
        try:
            loaded = load()
        except Exception as error:  # whatever somebody else's module does
            raise _wrong(name, f"cannot be loaded: {error!r}") from error
        _check_shape(name, loaded)
        classes.setdefault(loaded, name)
    if classes:
        # Few servers have any, and it takes seconds: not at the top, and not within the first step.
        import torch  # noqa: F401, PLC0415
    return [_make(name, processor, context) for processor, name in classes.items()]


def _sources(names: Sequence[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    installed = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    for entry_point in sorted(installed, key=lambda found: (found.name, found.value)):
        yield f"{entry_point.name} = {entry_point.value}", entry_point.load
    for name in names:
        yield name, partial(_load, name)


def _load(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError("it must be written module:Class")
    return getattr(importlib.import_module(module), attribute)


def _check_shape(name: str, loaded: object) -> None:
    if not isinstance(loaded, type):
        raise _wrong(name, f"is no class, but {loaded!r}")
    missing = [
        method
        for method in ("validate_params", "is_argmax_invariant", "apply")
        if not callable(getattr(loaded, method, None))
    ]
    if missing:
        raise _wrong(name, f"has no method {', '.join(missing)} (see {__name__}.LogitsProcessor)")


def _make(name: str, processor: type[LogitsProcessor], context: ProcessorContext) -> LogitsProcessor:
    try:
        return processor(context)
    except Exception as error:  # whatever somebody else's constructor does
        raise _wrong(name, f"cannot be made: {error!r}") from error


def apply_processors(
    logits: np.ndarray, rows: Sequence[Row], processors: Sequence[LogitsProcessor]
) -> np.ndarray:
    """One after the other. logits: fp32 [R, vocab]; overwritten or not, as the processors like.

    Raises:
      TypeError: a processor returned something else than such logits.
    """
    import torch  # noqa: PLC0415 - it is there

    all_greedy = all(row.params.is_greedy for row in rows)
    views = [_view(row) for row in rows]
    with torch.inference_mode():
        changed = torch.from_numpy(logits)
        for processor in processors:
            if not (all_greedy and processor.is_argmax_invariant()):
                changed = _apply(processor, changed, views)
        result: np.ndarray = changed.contiguous().numpy()
    return result


def _apply(processor: LogitsProcessor, logits: torch.Tensor, views: Sequence[LogitsRow]) -> torch.Tensor:
    changed = processor.apply(logits, views)
    if getattr(changed, "shape", None) != logits.shape or changed.dtype != logits.dtype:
        raise TypeError(
            f"{type(processor).__qualname__}.apply must return float32 logits of shape "
            f"{tuple(logits.shape)}, got {changed!r}"
        )
    return changed


def _view(row: Row) -> LogitsRow:
    sequence = row.sequence
    outputs = sequence.output_token_ids
    return LogitsRow(
        request_id=sequence.request_id,
        params=sequence.params,
        seed=sequence.seed,
        prompt_token_ids=sequence.prompt_token_ids,
        output_token_ids=[*outputs, *row.drafts] if row.drafts else outputs,
    )


def _wrong(name: str, problem: str) -> InvalidConfigError:
    return InvalidConfigError(f"The logits processor {name} {problem}.", field="logits_processors")
