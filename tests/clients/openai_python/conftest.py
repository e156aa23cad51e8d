from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from endpoint import Endpoint


def _client(endpoint: Endpoint) -> openai.OpenAI:
    # Strict: what is not as the client's own types say is an error.
    return openai.OpenAI(
        base_url=endpoint.api, api_key=endpoint.key, max_retries=0, _strict_response_validation=True
    )


@pytest.fixture
def talker(text: Endpoint) -> Iterator[openai.OpenAI]:
    with _client(text) as client:
        yield client


@pytest.fixture
def caller(tools: Endpoint) -> Iterator[openai.OpenAI]:
    with _client(tools) as client:
        yield client
