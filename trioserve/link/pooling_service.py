"""The service of an engine core that pools: whole texts."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

import attrs

from trioserve.core.pooling import PoolingCore, PoolingRunner
from trioserve.core.pooling_request import CorePoolingRequest
from trioserve.errors import InvalidRequestError, ModelNotSupportedError
from trioserve.link.columns import unpack_token_ids
from trioserve.link.messages import AddPooling, MessageError
from trioserve.link.pooling_columns import pack_pooled, split_pooled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import trio

    from trioserve.audio_input import AudioInput
    from trioserve.core.pooling_request import PoolingResult
    from trioserve.core.stats import CoreStats
    from trioserve.link.messages import Message, PooledOutputs
    from trioserve.link.service import Caller
    from trioserve.worker.lora_files import AdapterFile

__all__ = ["PoolingService", "SteeredPoolingRunner"]

log = logging.getLogger(__name__)


@attrs.frozen(eq=False)
class SteeredPoolingRunner:
    """A runner as `Controls` see it: there is no KV cache to give back, and there are no adapters."""

    _runner: PoolingRunner

    def allocate_kv_cache(self, num_blocks: int) -> None: ...
    def free_kv_cache(self) -> None: ...

    def load_weights(self) -> None:
        self._runner.load_weights()

    def free_weights(self) -> None:
        self._runner.free_weights()

    def read_adapter(self, path: str) -> AdapterFile:
        raise ModelNotSupportedError(
            f"The LoRA adapter in {path} cannot be used: models that pool take no adapters."
        )

    def add_adapter(self, key: str, file: AdapterFile) -> None: ...
    def remove_adapter(self, key: str) -> None: ...

    def align_audio(self, audio: AudioInput, token_ids: Sequence[int], num_prompt_tokens: int) -> list[float]:
        raise ValueError("the model hears no audio")


@attrs.frozen(eq=False)
class PoolingService:
    """See `trioserve.link.service.Service`. Every text gets to the core at once."""

    core: PoolingCore
    num_on_their_way = 0
    num_tokens_on_their_way = 0

    def receive(self, message: Message, caller: Caller[PoolingResult]) -> None:
        if not isinstance(message, AddPooling):
            raise MessageError(f"unexpected {type(message).__name__}")
        try:
            self.core.add(_to_core_request(message))
        except ValueError as error:  # the frontend let it through
            log.error("request %d cannot be run: %s", message.request_id, error)
            caller.refuse(message.request_id, InvalidRequestError(f"The text cannot be pooled: {error}."))

    def abort(self, request_ids: Sequence[int]) -> None:
        self.core.abort(request_ids)

    def split(self, result: PoolingResult) -> Iterator[PoolingResult]:
        return split_pooled(result)

    def pack(self, result: PoolingResult, stats: CoreStats) -> PooledOutputs:
        return pack_pooled(result, stats)

    async def rest_until(self, wanted: trio.Event) -> None:
        await wanted.wait()


def _to_core_request(add: AddPooling) -> CorePoolingRequest:
    return CorePoolingRequest(
        request_id=add.request_id,
        prompt_token_ids=unpack_token_ids(add.prompt_token_ids),
        token_type_ids=list(add.token_type_ids) or None,
        params=add.params,
        priority=add.priority,
        deadline=math.inf if add.time_left is None else time.monotonic() + add.time_left,
    )
