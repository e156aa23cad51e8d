"""What one pooling request asks for."""

from __future__ import annotations

import attrs

from trioserve.tasks import POOLING_TASKS, PoolingTask
from trioserve.validators import boolean, integer, one_of, optional, plain

__all__ = ["PoolingParams"]


@attrs.frozen(kw_only=True)
class PoolingParams:
    """How what a model makes of a text is pooled. Wrong values raise `InvalidRequestError`."""

    task: PoolingTask | None = attrs.field(
        default=None, converter=plain, validator=optional(one_of(POOLING_TASKS))
    )
    """None: the first that the model has."""
    use_activation: bool | None = attrs.field(default=None, validator=optional(boolean))
    """Embeddings are normalized to length 1, classes get probabilities (sigmoid or softmax); False: raw
    values. None: as the model has it, which is True for nearly all."""
    dimensions: int | None = attrs.field(
        default=None, converter=plain, validator=optional(integer("an integer >= 1", 1))
    )
    """Of an embedding: its first values only, normalized anew; for models that were trained for it."""
