"""LangChain's own standard tests of a chat model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

if TYPE_CHECKING:
    from endpoint import Endpoint
    from langchain_core.language_models import BaseChatModel


class TestChatModel(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _endpoint(self, tools: Endpoint) -> None:
        self._tools = tools

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": self._tools.api,
            "api_key": self._tools.key,
            "model": self._tools.model,
            "temperature": 0,
            "presence_penalty": 1.0,  # so small a model's jokes do not end without it
            "max_tokens": 160,
            "stream_usage": True,  # off by default for servers that are not OpenAI's
            "max_retries": 0,
        }

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def returns_usage_metadata(self) -> bool:
        return True

    @pytest.mark.xfail(
        reason="In float32 the model's joke has no end; in bfloat16 it has one, and this passes."
    )
    def test_structured_output_optional_param(self, model: BaseChatModel) -> None:
        super().test_structured_output_optional_param(model)
