"""What a model can be asked for."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["POOLING_TASKS", "Convert", "PoolingTask", "Runner", "Task"]

PoolingTask = Literal["embed", "token_embed", "classify", "token_classify"]
"""embed: a vector for the whole text; classify: a probability per label for it; token_...: for each token."""

Task = Literal["generate", "transcription", "score"] | PoolingTask
"""score: how well two texts fit. It is made of one of the others: of embeddings or token embeddings, or by a
cross-encoder, which classifies pairs with a single label."""

POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)

Runner = Literal["generate", "pooling"]
"""generate: token by token (also what is heard in audio); pooling: in one pass over the text."""

Convert = Literal["auto", "none", "embed", "classify"]
"""What a model for generation is made into by a pooler over its hidden states; auto: what its files say."""
