"""What a speech model may write next, by its own rules.

They are those of OpenAI's Whisper (`SuppressTokens` and `ApplyTimestampRules` in its decoding.py), and act on
a request whose `extra_args` have `timestamps`, true or false; others, such as the question for a language,
get what the model says. They act before logprobs are taken, as they do there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

import attrs
import numpy as np

from trioserve.errors import InvalidRequestError, ModelNotSupportedError
from trioserve.structuring import make_converter
from trioserve.validators import shown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from trioserve.sampling_params import SamplingParams
    from trioserve.worker.rows import Row

__all__ = ["SpeechRules"]

_converter = make_converter(forbid_extra_keys=False)


@attrs.frozen(kw_only=True)
class _GenerationJson:
    """Of generation_config.json."""

    no_timestamps_token_id: int
    eos_token_id: int
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    max_initial_timestamp_index: int | None = 50


@attrs.frozen(kw_only=True)
class SpeechRules:
    eot: int
    """Text is below, what is special above."""
    no_timestamps: int
    suppressed: tuple[int, ...]
    """Tokens that are never written: signs that no one says, and what only prompts have."""
    suppressed_at_begin: tuple[int, ...]
    max_initial_timestamp: int | None
    """Timestamps that a text may begin with, from <|0.00|> on, are at most this one."""

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """By generation_config.json.

        Raises:
          ModelNotSupportedError: it is missing or makes no sense.
        """
        path = directory / "generation_config.json"
        try:
            found = _converter.structure(json.loads(path.read_bytes()), _GenerationJson)
        except Exception as error:  # of the file, of JSON, or a group of cattrs'
            raise ModelNotSupportedError(f"{path}, which a speech model needs: {error!r}.") from error
        return cls(
            eot=found.eos_token_id,
            no_timestamps=found.no_timestamps_token_id,
            suppressed=tuple(found.suppress_tokens or ()),
            suppressed_at_begin=tuple(found.begin_suppress_tokens or ()),
            max_initial_timestamp=found.max_initial_timestamp_index,
        )

    @staticmethod
    def check(params: SamplingParams) -> None:
        """
        Raises:
          InvalidRequestError: `timestamps` is neither true nor false.
        """
        value = _argument(params)
        if value is not None and not isinstance(value, bool):
            raise InvalidRequestError(
                f"extra_args: timestamps must be true or false, got {shown(value)}.", parameter="extra_args"
            )

    def apply(self, logits: NDArray[np.float32], rows: Sequence[Row]) -> None:
        """Bar what may not come next; in place, fp32 [R, vocab]."""
        for values, row in zip(logits, rows, strict=True):
            with_timestamps = _argument(row.params)
            if with_timestamps is None:
                continue
            output = [*row.sequence.output_token_ids, *row.drafts]
            values[list(self.suppressed)] = -np.inf
            if not output:
                values[list(self.suppressed_at_begin)] = -np.inf
            if with_timestamps:
                self._bar_by_timestamps(values, output)

    def _bar_by_timestamps(self, values: NDArray[np.float32], output: Sequence[int]) -> None:
        first = self.no_timestamps + 1
        values[self.no_timestamps] = -np.inf
        self._bar_by_pairs(values, output)
        if not output:
            values[:first] = -np.inf
            if self.max_initial_timestamp is not None:
                values[first + self.max_initial_timestamp + 1 :] = -np.inf
        # If any timestamp is likelier than the likeliest text, one is written, even if each alone is not.
        if _log_sum(values[first:]) > values[:first].max():
            values[:first] = -np.inf

    def _bar_by_pairs(self, values: NDArray[np.float32], output: Sequence[int]) -> None:
        """Timestamps come in pairs, one that ends a text and one that begins the next, and never go back."""
        first = self.no_timestamps + 1
        ends_with_one = bool(output) and output[-1] >= first
        ends_with_two = ends_with_one and (len(output) < 2 or output[-2] >= first)
        if ends_with_two:
            values[first:] = -np.inf
        elif ends_with_one:
            values[: self.eot] = -np.inf
        last = next((token for token in reversed(output) if token >= first), None)
        if last is not None:
            # The second of a pair may be the same as the first; otherwise time goes on.
            values[first : last + (not ends_with_one or ends_with_two)] = -np.inf


def _argument(params: SamplingParams) -> Any:
    return None if params.extra_args is None else params.extra_args.get("timestamps")


def _log_sum(values: NDArray[np.float32]) -> float:
    """log(sum(exp(x))); -inf where nothing is left."""
    highest = values.max()
    if not np.isfinite(highest):
        return float(highest)
    return float(highest + np.log(np.exp(values - highest, dtype=np.float64).sum()))
