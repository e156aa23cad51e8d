"""The models behind the HTTP routes, and which of them a request means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from trioserve.errors import InvalidConfigError, InvalidRequestError
from trioserve.server.errors import model_not_found
from trioserve.server.reply_defaults import ReplyDefaults
from trioserve.server.service import Service
from trioserve.validators import shown

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Self

    from trioserve.async_llm import AsyncLLM
    from trioserve.server_args import ServerArgs
    from trioserve.tasks import Task

__all__ = ["ServedModels"]


@attrs.frozen(eq=False)
class ServedModels:
    """One service per engine, at least one. A name stands for one of them only."""

    services: Sequence[Service]
    """In the order of the command line: of several that could do it, the first does."""
    _by_name: Mapping[str, Service]

    @classmethod
    def of(cls, llms: Sequence[AsyncLLM], args: ServerArgs) -> Self:
        """
        Raises:
          InvalidConfigError: there is none, or two have a name in common.
        """
        defaults = ReplyDefaults.of(args)
        services = [Service.for_llm(llm, defaults) for llm in llms]
        if not services:
            raise InvalidConfigError("model must be one at least, got none.", field="model")
        by_name: dict[str, Service] = {}
        for service in services:
            for name in service.model_names:
                if by_name.setdefault(name, service) is not service:
                    raise InvalidConfigError(
                        f"served_model_name must be another for each model, got {name!r} twice.",
                        field="served_model_name",
                    )
        return cls(tuple(services), by_name)

    @property
    def only(self) -> Service | None:
        """The one model that there is; None if there are several."""
        return self.services[0] if len(self.services) == 1 else None

    def find(self, name: str) -> Service | None:
        """The model of this name, or the one that has the LoRA adapter of this name."""
        service = self._by_name.get(name)
        if service is not None:
            return service
        return next((service for service in self.services if service.llm.has_lora(name)), None)

    def with_task(self, *tasks: Task) -> list[Service]:
        """Those that can be asked for one of these."""
        return [service for service in self.services if service.has_task(*tasks)]

    def pick(self, name: str | None, among: Collection[Service]) -> Service:
        """The model that a request means which says this name, and which only `among` can serve. Without a
        name, or with an empty one, it is the first of these.

        Raises:
          ApiError: no model is served under this name (404).
          InvalidRequestError: the model is none of these.
        """
        service = self.find(name) if name else next(iter(among), self.services[0])
        if service is None:
            raise model_not_found(name or "")
        if service not in among:
            raise _cannot(service, among) if among else _nobody_can(self.services)
        return service


def _cannot(service: Service, able: Collection[Service]) -> InvalidRequestError:
    others = ", ".join(shown(other.model_names[0]) for other in able)
    return InvalidRequestError(
        f"The model {shown(service.model_names[0])} cannot do this: its tasks are {_tasks_of(service)}. "
        f"Here these can: {others}.",
        parameter="model",
    )


def _nobody_can(services: Sequence[Service]) -> InvalidRequestError:
    tasks = "; ".join(f"of {shown(service.model_names[0])} {_tasks_of(service)}" for service in services)
    return InvalidRequestError(f"No model here can do this. The tasks are {tasks}.", parameter="model")


def _tasks_of(service: Service) -> str:
    return ", ".join(service.llm.model.tasks)
