"""Encodes texts by a model of the transformers library, as many as compute attention by its interface."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from trioserve.errors import ModelNotSupportedError
from trioserve.worker.loader import TORCH_DTYPES
from trioserve.worker.packed_attention import PACKED_ATTENTION, UnsupportedAttentionError, register
from trioserve.worker.text_encoder import PackedTexts

if TYPE_CHECKING:
    from trioserve.config import ResolvedModel

__all__ = ["TransformersEncoder"]

_PADDED_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text")
"""model_types whose positions begin after that of the padding token."""

_SAME = 1e-2
"""How far hidden states of a text may differ between alone and beside others, in any dtype; mixed up texts
differ by far more."""


class TransformersEncoder:
    """See `trioserve.worker.text_encoder.TextEncoder`.

    torch keeps its number of compute threads per calling thread; it is set here.

    Raises:
      ModelNotSupportedError: transformers has no such model, it lacks weights, or it cannot keep texts apart
        that lie end to end.
      ModelSourceError: a file is damaged.
    """

    def __init__(self, model: ResolvedModel, threads: int) -> None:
        self.kernels = f"torch (transformers' {model.architecture})"
        self._source = model
        # Invariant: None exactly between free_weights and load_weights.
        self._model: Any = None
        self._arguments: frozenset[str] = frozenset()
        torch.set_num_threads(threads)
        register()
        self.load_weights()
        self._check_texts_are_apart()

    @torch.inference_mode()
    def encode(self, texts: PackedTexts) -> np.ndarray:
        assert self._model is not None, "the weights have been freed"
        arguments = {
            "input_ids": torch.from_numpy(texts.token_ids)[None],
            "position_ids": torch.from_numpy(texts.positions + self._first_position)[None],
            "token_type_ids": torch.from_numpy(texts.type_ids)[None],
            "use_cache": False,
        }
        given = {name: value for name, value in arguments.items() if name in self._arguments}
        bounds = torch.from_numpy(texts.starts.astype(np.int32))
        hidden = self._model(**given, cu_seq_lens_q=bounds).last_hidden_state[0]
        rows: np.ndarray = hidden.float().numpy()
        return rows

    def free_weights(self) -> None:
        self._model = None

    @torch.inference_mode()
    def load_weights(self) -> None:
        if self._model is None:
            self._model = _load(self._source)
            self._arguments = frozenset(inspect.signature(self._model.forward).parameters)

    def close(self) -> None:
        """There is nothing of its own that would have to end."""

    @property
    def _first_position(self) -> int:
        config = self._model.config
        return config.pad_token_id + 1 if config.model_type in _PADDED_POSITIONS else 0

    def _check_texts_are_apart(self) -> None:
        """Whatever transformers does with arguments: beside another, a text comes out as it does alone."""
        texts = [np.arange(5, 8) % self._source.vocab_size, np.arange(6, 8) % self._source.vocab_size]
        try:
            alone = [self.encode(_packed(text)) for text in texts]
            together = self.encode(_packed(*texts))
        except UnsupportedAttentionError as error:
            raise _unsupported(self._source.architecture, str(error)) from error
        if not np.allclose(np.concatenate(alone), together, rtol=_SAME, atol=_SAME):
            raise _unsupported(self._source.architecture, "it does not keep texts apart that lie end to end")


def _packed(*texts: np.ndarray) -> PackedTexts:
    token_ids = np.concatenate(texts)
    return PackedTexts(
        token_ids=token_ids,
        positions=np.concatenate([np.arange(len(text)) for text in texts]),
        type_ids=np.zeros_like(token_ids),
        lengths=[len(text) for text in texts],
    )


def _load(model: ResolvedModel) -> Any:
    """The model without its head."""
    model_class = getattr(transformers, model.architecture, None)
    if model_class is None:
        raise ModelNotSupportedError(
            f"transformers {transformers.__version__} has no {model.architecture}, and neither have we."
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        raise _unsupported(model.architecture, "it has an attention of its own")
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it would start a thread
    loaded, report = model_class.from_pretrained(
        model.directory,
        dtype=TORCH_DTYPES[model.dtype],
        attn_implementation=PACKED_ATTENTION,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    if missing := sorted(name for name in report["missing_keys"] if "pooler" not in name):
        raise ModelNotSupportedError(f"The checkpoint lacks {', '.join(missing[:5])}.")
    base = loaded.base_model.eval()
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise _unsupported(model.architecture, "it cannot be told positions")
    return base


def _unsupported(architecture: str, why: str) -> ModelNotSupportedError:
    return ModelNotSupportedError(
        f"transformers' {architecture} cannot compute texts without padding between them: {why}."
    )
