"""How many tokens a step may have, and how many of them go to prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.audio_input import AudioInput
    from trioserve.config import SchedulerConfig

__all__ = ["StepBudget"]

_STEPS_FOR_BACKLOG = 8


class StepBudget:
    """What is left of a step, while its sequences are served one after the other.

    A sequence that lacks one token decodes; one that lacks more waits, for its first token or, after a
    preemption, for its next. Each token of a prompt makes the step longer for all. So where some decode,
    prompts together get `prefill_beside_decodes` tokens, or an eighth of all that those who wait lack, if
    that is more: the more there is to do, the less it may be put off. Where nobody decodes, they get the
    whole step.

    Audio is encoded in the step in which a sequence that hears it begins, which takes as long as many tokens:
    so in one step all who begin hear the same.
    """

    def __init__(self, config: SchedulerConfig, *, num_decoding: int, waiting: Sequence[int]) -> None:
        """How many sequences decode, and how much each of those lacks that wait and could be in the step."""
        self._num_tokens = self._num_prefill = config.max_num_batched_tokens
        if num_decoding:
            part = max(config.prefill_beside_decodes, sum(waiting) // _STEPS_FOR_BACKLOG)
            self._num_prefill = min(self._num_prefill, part)
        self._audio: str | None = None  # of those who begin
        self._long = config.long_prefill_token_threshold
        self._limit_of_long = self._num_prefill
        if num_decoding + len(waiting) > 1:
            self._limit_of_long = min(self._limit_of_long, self._long)
        if len(waiting) > 1:  # a long one leaves some to those that come after it
            self._limit_of_long = min(self._limit_of_long, -(-self._num_prefill // 2))

    def has_room_for(self, audio: AudioInput | None) -> bool:
        """One that waits, and hears this, could begin."""
        if audio is not None and self._audio is not None and audio.digest != self._audio:
            return False
        return self._num_tokens > 0 and self._num_prefill > 0

    def portion(self, num_lacking: int, *, num_behind: int = 0) -> int:
        """How much of what it lacks a sequence gets: at least 1. `num_behind` come after it, which get at
        least 1 each, too."""
        if num_lacking == 1:
            return 1
        limit = min(self._num_tokens - num_behind, self._num_prefill)
        if num_lacking > self._long:
            limit = min(limit, self._limit_of_long)
        return max(1, min(num_lacking, limit))

    def take(self, num_lacking: int, num_tokens: int, audio: AudioInput | None = None) -> None:
        """One that lacks `num_lacking` has got `num_tokens`; audio: what it hears, if it begins."""
        if audio is not None:
            self._audio = audio.digest
        self._num_tokens -= num_tokens
        if num_lacking > 1:
            self._num_prefill -= num_tokens
