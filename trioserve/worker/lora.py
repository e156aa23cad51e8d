"""Low-rank adapters (https://arxiv.org/abs/2106.09685) beside the model's own weights, many in one step.

What an adapter adds to a product y = x W^T is (x A^T) B^T * scale, two thin products, for the rows that have
this adapter. Where W is several matrices of the checkpoint in one, so is this:

    qkv:  x [T, in] @ down [in, r_q + r_k + r_v] @ up [r_q + r_k + r_v, out]

    with up =  | B_q^T            |
               |       B_k^T      |     and zeros elsewhere: somewhat more to multiply, and half the calls,
               |             B_v^T|     which is what a step of few rows consists of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import attrs
import torch

from trioserve.errors import ModelNotSupportedError
from trioserve.models.products import products

if TYPE_CHECKING:
    from trioserve.models.config import DecoderConfig
    from trioserve.worker.batch import ScheduledSequence
    from trioserve.worker.lora_files import AdapterFile, LowRank

__all__ = ["Adapter", "Delta", "StepAdapters", "make_adapter", "step_adapters"]


@attrs.frozen(eq=False)
class Delta:
    """What an adapter adds to one product."""

    down: torch.Tensor
    """[in_features, R]."""
    up: torch.Tensor
    """[R, out_features], scaled."""


Adapter: TypeAlias = Mapping[tuple[int, str], Delta]
"""(layer, product) -> what is added to it."""


@torch.inference_mode()
def make_adapter(file: AdapterFile, model: DecoderConfig, dtype: torch.dtype) -> Adapter:
    """In the form that computes, of the model's dtype.

    Raises:
      ModelNotSupportedError: there are values that are not finite, or not in this dtype.
    """
    adapter = {}
    for layer in range(model.num_layers):
        for name, product in products(model).items():
            parts = {part: file[layer, part] for part in product.parts if (layer, part) in file}
            if parts:
                delta = adapter[layer, name] = _stack(parts, product.parts, dtype)
                if not (delta.down.isfinite().all() and delta.up.isfinite().all()):
                    raise ModelNotSupportedError(
                        f"The adapter's A and scale * B must be finite as {dtype}, those of layer {layer}'s "
                        f"{', '.join(parts)} are not."
                    )
    return adapter


def _stack(parts: Mapping[str, LowRank], rows: Mapping[str, int], dtype: torch.dtype) -> Delta:
    down = torch.cat([part.a for part in parts.values()]).to(dtype).t()
    up = torch.zeros(down.shape[1], sum(rows.values()), dtype=dtype)
    first_rank = first_row = 0
    for name, num_rows in rows.items():
        if (part := parts.get(name)) is not None:
            rank = len(part.a)
            up[first_rank : first_rank + rank, first_row : first_row + num_rows] = (
                part.b.float().t() * part.scale
            )
            first_rank += rank
        first_row += num_rows
    return Delta(down, up)


class StepAdapters:
    """See `trioserve.models.decoder.AdapterContext`.

    What a row gets is rounded twice in the same way, whether all rows of the step have its adapter or it
    alone does.
    """

    def __init__(self, members: Sequence[tuple[Adapter, torch.Tensor | None]]) -> None:
        """Each adapter, and its rows, int64; None: all that there are."""
        self._members = members

    def add(self, layer: int, product: str, x: torch.Tensor, y: torch.Tensor) -> None:
        for adapter, rows in self._members:
            delta = adapter.get((layer, product))
            if delta is None:
                continue
            own = x if rows is None else x[rows]
            change = own @ delta.down @ delta.up
            if rows is None:
                y += change
            else:
                y.index_add_(0, rows, change)


def step_adapters(
    sequences: Sequence[ScheduledSequence], adapters: Mapping[str, Adapter]
) -> StepAdapters | None:
    """For sequences whose tokens are the rows, in this order; None where none has an adapter.

    adapters: by their keys.
    """
    rows: dict[str, list[int]] = {}
    num_rows = 0
    for sequence in sequences:
        end = num_rows + len(sequence.token_ids)
        if sequence.lora is not None:
            rows.setdefault(sequence.lora, []).extend(range(num_rows, end))
        num_rows = end
    if not rows:
        return None
    return StepAdapters(
        [(adapters[key], None if len(own) == num_rows else torch.tensor(own)) for key, own in rows.items()]
    )
