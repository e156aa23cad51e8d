"""When each token of a text was said: from what a Whisper decoder looked at while it read the text.

Some heads of the cross-attention follow the speech ("alignment heads"). Their weights, over all tokens and
frames, are standardised, smoothed and averaged; the cheapest way through them that never goes back says which
frames belong to which token (dynamic time warping). As OpenAI's `whisper.timing` and transformers do it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from trioserve.audio_input import SAMPLING_RATE

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from trioserve.models.config_whisper import WhisperConfig
    from trioserve.models.whisper import WhisperDecoder

__all__ = ["align", "alignment_heads", "warp"]

_FILTER_WIDTH = 7
_FRAMES_PER_SECOND = 50


def alignment_heads(directory: Path, config: WhisperConfig) -> Mapping[int, Sequence[int]]:
    """Layer -> heads: those that generation_config.json names, else all of the upper half of the layers."""
    path = directory / "generation_config.json"
    found = json.loads(path.read_bytes()).get("alignment_heads") if path.is_file() else None
    if not found:
        layers = range(config.num_decoder_layers // 2, config.num_decoder_layers)
        return {layer: range(config.num_heads) for layer in layers}
    heads: dict[int, list[int]] = {}
    for layer, head in found:
        heads.setdefault(layer, []).append(head)
    return heads


def align(
    decoder: WhisperDecoder,
    heads: Mapping[int, Sequence[int]],
    heard: Callable[[int], torch.Tensor],
    token_ids: Sequence[int],
    *,
    num_prompt_tokens: int,
    num_samples: int,
) -> list[float]:
    """Seconds at which each token begins, from `num_prompt_tokens` on; they never fall.

    heard: layer -> keys and values of the audio, [2, heads, frames, head_dim]; num_samples: of the audio, so
    that no token ends up in the silence that fills its window.
    """
    recording = _Recording(heads, heard)
    positions = torch.arange(len(token_ids))
    reading = _Reading()
    decoder.forward(
        torch.tensor(token_ids), positions, reading, recording, [torch.empty(0)] * decoder.num_layers
    )
    num_frames = max(1, num_samples * _FRAMES_PER_SECOND // SAMPLING_RATE)
    weights = torch.cat(recording.weights)[:, num_prompt_tokens:, :num_frames]
    deviation, mean = torch.std_mean(weights, dim=1, keepdim=True, unbiased=False)
    standard = (weights - mean) / deviation.clamp_min(1e-10)
    smooth = _median(standard).mean(0)
    return [frame / _FRAMES_PER_SECOND for frame in warp(-smooth.double().numpy())]


@attrs.frozen(eq=False)
class _Reading:
    """See `trioserve.models.decoder.AttentionContext`: one text, whole, without a cache."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        queries, keys, values = (part.transpose(0, 1)[None] for part in (query, key, value))
        return scaled_dot_product_attention(queries, keys, values, is_causal=True)[0].transpose(0, 1)


@attrs.frozen(eq=False)
class _Recording:
    """See `trioserve.models.whisper.CrossAttention`: one text, whose looks at the audio are kept."""

    _heads: Mapping[int, Sequence[int]]
    _heard: Callable[[int], torch.Tensor]
    weights: list[torch.Tensor] = attrs.field(factory=list)
    """Each [some heads, T, frames]."""

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        keys, values = self._heard(layer)
        weights = torch.softmax(query.transpose(0, 1) @ keys.transpose(1, 2), dim=-1)
        if layer in self._heads:
            self.weights.append(weights[list(self._heads[layer])])
        heard: torch.Tensor = (weights @ values).transpose(0, 1)
        return heard


def _median(values: torch.Tensor) -> torch.Tensor:
    """Of each value and its neighbours along the last dimension; mirrored beyond the ends."""
    half = _FILTER_WIDTH // 2
    if values.shape[-1] <= half:
        return values
    padded = torch.nn.functional.pad(values, (half, half), mode="reflect")
    found: torch.Tensor = padded.unfold(-1, _FILTER_WIDTH, 1).sort()[0][..., half]
    return found


def warp(costs: NDArray[np.float64]) -> list[int]:
    """For each row, the column at which the cheapest way enters it. It goes from the first corner to the
    last, by one row, one column or both at a time. costs: [rows, columns], at least one each.

    One column at a time: with c the costs of a column and a the cheaper way into it from the left, the way
    down a column gives t[i] = c[i] + min(a[i], t[i - 1]), which is a running minimum of a - (sums of c).
    """
    num_rows, num_columns = costs.shape
    total = np.full((num_rows + 1, num_columns + 1), np.inf)
    total[0, 0] = 0.0
    for column in range(num_columns):
        sums = np.cumsum(costs[:, column])
        entry = np.minimum(total[:-1, column], total[1:, column])
        total[1:, column + 1] = sums + np.minimum.accumulate(entry - (sums - costs[:, column]))
    return _trace(total)


def _trace(total: NDArray[np.float64]) -> list[int]:
    """Back from the last corner; of equal ways, the one along the row."""
    row, column = total.shape[0] - 1, total.shape[1] - 1
    entered = [0] * row
    while row > 0:
        entered[row - 1] = column - 1
        both, up, left = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
        if both < up and both < left:
            row, column = row - 1, column - 1
        elif up < both and up < left:
            row -= 1
        else:
            column -= 1
    return entered
