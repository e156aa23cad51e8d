"""What a model can be asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.errors import InvalidRequestError
from trioserve.tasks import POOLING_TASKS

if TYPE_CHECKING:
    from trioserve.config import ResolvedModel
    from trioserve.tasks import PoolingTask, Task

__all__ = ["check_generates", "check_task", "pooling_tasks"]


def check_task(model: ResolvedModel, task: Task) -> None:
    """
    Raises:
      InvalidRequestError: the model does not have this task; the message says which it has.
    """
    if task not in model.tasks:
        raise _unsupported(model, f"task {task!r}")


def check_generates(model: ResolvedModel) -> None:
    """
    Raises:
      InvalidRequestError: the model pools, and generates nothing.
    """
    if model.runner != "generate":
        raise _unsupported(model, "task 'generate'")


def pooling_tasks(model: ResolvedModel) -> tuple[PoolingTask, ...]:
    """Those of the model's tasks that `encode` is for, the most usual first.

    Raises:
      InvalidRequestError: there are none.
    """
    found = tuple(task for task in model.tasks if task in POOLING_TASKS)
    if not found:
        raise _unsupported(model, "pooling of texts")
    return found


def _unsupported(model: ResolvedModel, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"This model does not support {wanted}: it supports {', '.join(model.tasks)}.", parameter="task"
    )
