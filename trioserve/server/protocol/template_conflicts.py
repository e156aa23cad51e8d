"""What is wrong between the fields of a conversation that are about the chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from trioserve.server.protocol.reading import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["taken_template_names", "template_conflicts"]


class TemplateFields(Protocol):
    """What both conversations to answer and conversations to pool have."""

    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> Mapping[str, Any] | None: ...


def template_conflicts(request: TemplateFields) -> Iterator[Problem]:
    if request.add_generation_prompt and request.continue_final_message:
        sentence = "continue_final_message and add_generation_prompt cannot both be true."
        yield Problem("continue_final_message", sentence)
    yield from taken_template_names(request.chat_template_kwargs)


def taken_template_names(kwargs: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Of `chat_template_kwargs`: names that are not the client's."""
    for name in ("chat_template", "tokenize"):
        if name in (kwargs or {}):
            path = f"chat_template_kwargs.{name}"
            yield Problem(path, f"{path} must not be given: it is the server's to choose.")
