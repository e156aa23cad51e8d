"""GET /v1/models and /v1/models/{model}."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.server.protocol.models import ModelCard, ModelList
from trioserve.server.replies import json_reply
from trioserve.server.service import Service

if TYPE_CHECKING:
    from quart import Response

__all__ = ["Models"]


@attrs.frozen(eq=False)
class Models:
    """One card per name the model is served under."""

    _service: Service

    async def list(self) -> Response:
        return json_reply(ModelList([self._card(name) for name in self._service.model_names]))

    async def retrieve(self, model: str) -> Response:
        self._service.check_model(model)
        return json_reply(self._card(model))

    def _card(self, name: str) -> ModelCard:
        llm = self._service.llm
        return ModelCard(
            id=name,
            created=self._service.started,
            root=llm.config.model.model,
            max_model_len=llm.model.max_model_len,
        )
