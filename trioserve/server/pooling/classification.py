"""POST /classify."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.pooling_params import PoolingParams
from trioserve.server.pooling.number_replies import count_tokens
from trioserve.server.pooling.replies import encode_each, large_json_reply
from trioserve.server.pooling.requests import PoolingRequests
from trioserve.server.protocol.classification import Classification, ClassificationList
from trioserve.server.protocol.pooling_readers import CLASSIFY_READER

if TYPE_CHECKING:
    from quart import Response

    from trioserve.outputs import PoolingRequestOutput

__all__ = ["Classify"]


@attrs.frozen(eq=False)
class Classify:
    """The handler."""

    _requests: PoolingRequests

    async def create(self) -> Response:
        request, head = await self._requests.receive(CLASSIFY_READER, "classify")
        params = PoolingParams(task="classify", use_activation=request.use_activation)
        outputs = await self._requests.pool(request, params, head)
        answer = ClassificationList(
            id=head.id, created=head.created, model=head.model, data=[], usage=count_tokens(outputs)
        )
        items = (self._item(index, output) for index, output in enumerate(outputs))
        return large_json_reply(answer, {"data": encode_each(items)})

    def _item(self, index: int, output: PoolingRequestOutput) -> Classification:
        probs = output.outputs.data.tolist()
        return Classification(index=index, label=self._label(probs), probs=probs, num_classes=len(probs))

    def _label(self, probs: list[float]) -> str | None:
        pooler = self._requests.llm.model.pooler
        if pooler is None or not pooler.labels:
            return None
        return pooler.labels[max(range(len(probs)), key=probs.__getitem__)]
