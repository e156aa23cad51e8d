"""GET /v1/models and /v1/models/{model}."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trioserve.server.protocol.models import ModelCard, ModelList
from trioserve.server.replies import json_reply
from trioserve.server.served_models import ServedModels

if TYPE_CHECKING:
    from quart import Response

    from trioserve.frontend.adapters import Adapter
    from trioserve.server.service import Service

__all__ = ["Models"]


@attrs.frozen(eq=False)
class Models:
    """One card per name that a model is served under, and one per LoRA adapter."""

    _models: ServedModels

    async def list(self) -> Response:
        cards = [_card(service, name) for service in self._models.services for name in service.model_names]
        for service in self._models.services:
            cards += [_adapter_card(service, adapter) for adapter in await service.llm.list_loras()]
        return json_reply(ModelList(cards))

    async def retrieve(self, model: str) -> Response:
        service = self._models.pick(model, self._models.services)
        for adapter in await service.llm.list_loras():
            if adapter.name == model:
                return json_reply(_adapter_card(service, adapter))
        service.check_model(model)  # the adapter may be gone meanwhile
        return json_reply(_card(service, model))


def _adapter_card(service: Service, adapter: Adapter) -> ModelCard:
    return ModelCard(
        id=adapter.name,
        created=adapter.created,
        root=adapter.path,
        parent=adapter.base_model_name or service.model_names[0],
        max_model_len=service.llm.model.max_model_len,
        tasks=service.llm.model.tasks,
    )


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=service.started,
        root=service.llm.config.model.model,
        max_model_len=service.llm.model.max_model_len,
        tasks=service.llm.model.tasks,
    )
