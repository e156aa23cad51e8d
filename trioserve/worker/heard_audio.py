"""What speech models remember of audio: keys and values of the decoder's cross-attention.

A window of 30 seconds takes a seat of 18 MB (Whisper tiny) and more, so there are as many seats as sequences
run at a time, and equal audio shares one. Who ends leaves its seat as it is: the next request about the same
audio (another temperature, or after a question for its language) finds it there, until it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from trioserve.worker.native_buffers import mapped_zeros

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.models.config_whisper import WhisperConfig
    from trioserve.worker.batch import ScheduledSequence

__all__ = ["HeardAudio", "Seats", "StepHearing"]

_MAX_IDLE = 16
"""Seats whose audio nobody asks for that are kept before memory is used that was not used before."""


class Seats:
    """Which audio sits where. Invariant: a seat below `num_used` has at most one audio, others have none."""

    def __init__(self, num_seats: int) -> None:
        self.num_seats = num_seats
        self._taken: dict[str, int] = {}  # digest -> seat; who was asked for longest ago comes first
        self._num_used = 0

    def __len__(self) -> int:
        return len(self._taken)

    def find(self, digest: str) -> int | None:
        """The seat of this audio, which has been asked for now; None if it has none."""
        if (seat := self._taken.pop(digest, None)) is not None:
            self._taken[digest] = seat
        return seat

    def take(self, digest: str, wanted: set[str]) -> int:
        """A seat for an audio that has none; one that is in `wanted`, of num_seats at most, keeps its own."""
        num_idle = sum(other not in wanted for other in self._taken)
        if self._num_used < self.num_seats and num_idle < _MAX_IDLE:
            seat = self._num_used
            self._num_used += 1
        else:
            seat = self._taken.pop(next(other for other in self._taken if other not in wanted))
        self._taken[digest] = seat
        return seat


class HeardAudio:
    """Owns the keys and values, fp32 [seats, layers, 2, heads, frames, head_dim]; memory is used as seats are
    first taken."""

    def __init__(self, config: WhisperConfig, num_seats: int) -> None:
        self._config = config
        self.seats = Seats(num_seats)
        shape = (config.num_heads, config.num_frames, config.head_dim)
        memory = mapped_zeros(num_seats * self.bytes_per_seat(config))
        self._memory = torch.from_numpy(memory.view(np.float32)).view(
            num_seats, config.num_decoder_layers, 2, *shape
        )

    @staticmethod
    def bytes_per_seat(config: WhisperConfig) -> int:
        return config.num_decoder_layers * 2 * config.num_frames * config.hidden_size * 4

    def store(self, seat: int, keys_values: torch.Tensor) -> None:
        """keys_values: [frames, layers * 2 * hidden_size]."""
        shape = (self._config.num_frames, self._config.num_decoder_layers, 2, self._config.num_heads, -1)
        self._memory[seat].copy_(keys_values.view(shape).permute(1, 2, 3, 0, 4))

    def at(self, seat: int, layer: int) -> torch.Tensor:
        """[2, heads, frames, head_dim]"""
        return self._memory[seat, layer]


@attrs.frozen(eq=False)
class StepHearing:
    """See `trioserve.models.whisper.CrossAttention`; made once per step, used by every layer."""

    _audio: HeardAudio
    _parts: list[tuple[slice, int]]
    """Rows of the step, and the seat of what they hear; in order, all of them."""

    @classmethod
    def of(
        cls, sequences: Sequence[ScheduledSequence], seats: Sequence[int], audio: HeardAudio
    ) -> StepHearing:
        """Neighbours that hear the same are one part."""
        parts: list[tuple[slice, int]] = []
        row = 0
        for sequence, seat in zip(sequences, seats, strict=True):
            end = row + len(sequence.token_ids)
            if parts and parts[-1][1] == seat:
                parts[-1] = (slice(parts[-1][0].start, end), seat)
            else:
                parts.append((slice(row, end), seat))
            row = end
        return cls(audio, parts)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        heard = []
        for rows, seat in self._parts:
            keys, values = self._audio.at(seat, layer)[:, None]
            own = query[rows].transpose(0, 1)[None]  # with a batch of 1, as torch's fused attention wants it
            heard.append(scaled_dot_product_attention(own, keys, values, scale=1.0)[0].transpose(0, 1))
        return heard[0] if len(heard) == 1 else torch.cat(heard)
