"""GET /v1/models and /v1/models/{model}."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.server.protocol.models import ModelCard, ModelList
from trioserve.server.replies import json_reply
from trioserve.server.service import Service

if TYPE_CHECKING:
    from quart import Response

    from trioserve.frontend.adapters import Adapter

__all__ = ["Models"]


@attrs.frozen(eq=False)
class Models:
    """One card per name the model is served under, and one per LoRA adapter."""

    _service: Service

    async def list(self) -> Response:
        cards = [self._card(name) for name in self._service.model_names]
        cards += map(self._adapter_card, await self._service.llm.list_loras())
        return json_reply(ModelList(cards))

    async def retrieve(self, model: str) -> Response:
        for adapter in await self._service.llm.list_loras():
            if adapter.name == model:
                return json_reply(self._adapter_card(adapter))
        self._service.check_model(model)
        return json_reply(self._card(model))

    def _adapter_card(self, adapter: Adapter) -> ModelCard:
        return ModelCard(
            id=adapter.name,
            created=adapter.created,
            root=adapter.path,
            parent=adapter.base_model_name or self._service.model_names[0],
            max_model_len=self._service.llm.model.max_model_len,
        )

    def _card(self, name: str) -> ModelCard:
        llm = self._service.llm
        return ModelCard(
            id=name,
            created=self._service.started,
            root=llm.config.model.model,
            max_model_len=llm.model.max_model_len,
        )
