"""LangChain's own standard tests of embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_openai import OpenAIEmbeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests

if TYPE_CHECKING:
    from endpoint import Endpoint


class _Embeddings(EmbeddingsIntegrationTests):
    @pytest.fixture(autouse=True)
    def _endpoint(self, embeddings: Endpoint) -> None:
        self._server = embeddings

    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {
            "base_url": self._server.api,
            "api_key": self._server.key,
            "model": self._server.model,
            "max_retries": 0,
        }


class TestTexts(_Embeddings):
    """Texts as they are: the way for models that are not OpenAI's."""

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return super().embedding_model_params | {"check_embedding_ctx_length": False}
