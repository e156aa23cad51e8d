"""The layers between pooled hidden states and results. Imports no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trioserve.config import DenseActivation
from trioserve.errors import ModelNotSupportedError
from trioserve.models.bert_config import family_of
from trioserve.worker.checkpoint import open_checkpoint, read_config
from trioserve.worker.float_tensors import read_floats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trioserve.config import DenseModule, ResolvedModel
    from trioserve.worker.checkpoint import Checkpoint

__all__ = ["Head", "HeadLayer", "load_head"]


@attrs.frozen(eq=False, kw_only=True)
class HeadLayer:
    weight: np.ndarray
    """float32 [out_features, in_features]."""
    bias: np.ndarray | None = None
    activation: DenseActivation = "identity"
    norm: np.ndarray | None = None
    """float32 [out_features]: a layer norm comes last, multiplied by this."""
    norm_eps: float = 1e-5

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[rows, out_features] from [rows, in_features]."""
        y: np.ndarray = x @ self.weight.T
        if self.bias is not None:
            y += self.bias
        y = ACTIVATIONS[self.activation](y)
        if self.norm is None:
            return y
        centered = y - y.mean(-1, keepdims=True)
        deviation = np.sqrt((centered**2).mean(-1, keepdims=True) + self.norm_eps)
        normed: np.ndarray = centered / deviation * self.norm
        return normed


Head = tuple[HeadLayer, ...]
"""One after the other."""


def _gelu(x: np.ndarray) -> np.ndarray:
    erf = np.array([math.erf(value) for value in (x / math.sqrt(2)).flat], x.dtype).reshape(x.shape)
    y: np.ndarray = x * 0.5 * (1 + erf)
    return y


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    y: np.ndarray = x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return y


def _sigmoid(x: np.ndarray) -> np.ndarray:
    y: np.ndarray = 1 / (1 + np.exp(-x))
    return y


ACTIVATIONS: dict[DenseActivation, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: x * _sigmoid(x),
}


def load_head(model: ResolvedModel) -> Head:
    """What the model's pooler asks for; empty where hidden states are the results.

    Raises:
      ModelNotSupportedError: the checkpoint lacks layers, or has others.
      ModelSourceError: a file is damaged.
    """
    assert model.pooler is not None
    directory = Path(model.directory)
    if not model.pooler.labels:
        return tuple(_dense(directory, module) for module in model.pooler.dense)
    raw = read_config(directory)
    with open_checkpoint(directory) as checkpoint:
        plans = _plans(model, raw)
        return tuple(_layer(checkpoint, plan, model.pooler.hidden_size) for plan in plans)


@attrs.frozen(kw_only=True)
class _Plan:
    """A layer as it lies in a checkpoint."""

    name: str
    out_features: int
    activation: DenseActivation = "identity"
    norm: str | None = None
    norm_eps: float = 1e-5


_HIDDEN_LAYERS: dict[str, tuple[str, DenseActivation, str]] = {
    "Bert": ("bert.pooler.dense", "tanh", "classifier"),
    "Roberta": ("classifier.dense", "tanh", "classifier.out_proj"),
    "XLMRoberta": ("classifier.dense", "tanh", "classifier.out_proj"),
    "Camembert": ("classifier.dense", "tanh", "classifier.out_proj"),
    "Electra": ("classifier.dense", "gelu", "classifier.out_proj"),
    "DistilBert": ("pre_classifier", "relu", "classifier"),
}
"""Of sequence classifiers: family -> a layer, its activation, and the layer that gives the logits."""


def _plans(model: ResolvedModel, raw: dict[str, object]) -> Sequence[_Plan]:
    assert model.pooler is not None
    family, pooler = family_of(model.architecture), model.pooler
    num_labels = len(pooler.labels)
    if family == "ModernBert":
        return [_modernbert_plan(raw, pooler.hidden_size), _Plan(name="classifier", out_features=num_labels)]
    if family not in _HIDDEN_LAYERS:
        return [_Plan(name="score", out_features=num_labels)]  # all that transformers makes of decoders
    if pooler.pooling_type == "all":
        return [_Plan(name="classifier", out_features=num_labels)]
    hidden, activation, last = _HIDDEN_LAYERS[family]
    return [
        _Plan(name=hidden, out_features=pooler.hidden_size, activation=activation),
        _Plan(name=last, out_features=num_labels),
    ]


def _modernbert_plan(raw: dict[str, object], width: int) -> _Plan:
    activation = raw.get("classifier_activation", "gelu")
    if activation != "gelu":
        raise ModelNotSupportedError(f"config.json: classifier_activation must be gelu, got {activation!r}.")
    eps = raw.get("norm_eps", 1e-5)
    assert isinstance(eps, float)
    return _Plan(name="head.dense", out_features=width, activation="gelu", norm="head.norm", norm_eps=eps)


def _layer(checkpoint: Checkpoint, plan: _Plan, in_features: int) -> HeadLayer:
    """A bias is added if there is one."""
    bias = f"{plan.name}.bias"
    out = plan.out_features
    return HeadLayer(
        weight=read_floats(checkpoint, f"{plan.name}.weight", [out, in_features]),
        bias=read_floats(checkpoint, bias, [out]) if bias in checkpoint.names else None,
        activation=plan.activation,
        norm=read_floats(checkpoint, f"{plan.norm}.weight", [out]) if plan.norm else None,
        norm_eps=plan.norm_eps,
    )


def _dense(directory: Path, module: DenseModule) -> HeadLayer:
    with open_checkpoint(directory / module.folder) as checkpoint:
        return HeadLayer(
            weight=read_floats(checkpoint, "linear.weight", [module.out_features, module.in_features]),
            bias=read_floats(checkpoint, "linear.bias", [module.out_features]) if module.bias else None,
            activation=module.activation,
        )
