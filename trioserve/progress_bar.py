"""The bar that offline generation shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

if TYPE_CHECKING:
    from trioserve.outputs import BeamSearchOutput, RequestOutput

__all__ = ["ProgressBar", "UseTqdm"]

UseTqdm = bool | Callable[..., Any]
"""True: a progress bar; False: none; a callable: called in place of tqdm, with its keyword arguments."""


class _Tqdm(tqdm):  # type: ignore[misc]  # tqdm has no types
    monitor_interval = 0  # no monitor thread, which would outlive the bar


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """Counts what is finished, and estimates tokens per second since it was made."""

    def __init__(
        self,
        total: int | None,
        use_tqdm: UseTqdm,
        *,
        what: str = "Processed prompts",
        unit: str = "it",
    ) -> None:
        """`total` None: nobody knows how much there is."""
        self._bar: Any = None
        self._started = time.monotonic()
        self._input_tokens = 0
        self._output_tokens = 0
        if use_tqdm and total != 0:
            make_bar = _Tqdm if use_tqdm is True else use_tqdm
            self._bar = make_bar(total=total, desc=what, unit=unit, dynamic_ncols=True, postfix=self._speed())

    def advance(self, output: RequestOutput) -> None:
        """Count a finished request: all of its completions."""
        self.count(
            len(output.outputs),
            len(output.prompt_token_ids) * len(output.outputs),
            sum(len(completion.token_ids) for completion in output.outputs),
        )

    def advance_search(self, output: BeamSearchOutput) -> None:
        """Count a finished beam search: one prompt, and the sequences that it found."""
        num_output_tokens = sum(len(sequence.output_token_ids) for sequence in output.sequences)
        self.count(1, len(output.prompt_token_ids), num_output_tokens)

    def count(self, number: int, num_input_tokens: int, num_output_tokens: int) -> None:
        """So many are finished, with so many tokens in all."""
        if self._bar is None:
            return
        self._input_tokens += num_input_tokens
        self._output_tokens += num_output_tokens
        self._bar.set_postfix_str(self._speed(), refresh=False)
        self._bar.update(number)

    def _speed(self) -> str:
        elapsed = max(time.monotonic() - self._started, 1e-3)
        return (
            f"est. speed input: {self._input_tokens / elapsed:.2f} toks/s, "
            f"output: {self._output_tokens / elapsed:.2f} toks/s"
        )

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
