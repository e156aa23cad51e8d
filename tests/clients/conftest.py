"""The servers. `benchmarks/clients.py` starts them and says where they are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from endpoint import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator


def _endpoint(name: str) -> Endpoint:
    try:
        return Endpoint(
            os.environ[f"TRIOSERVE_{name}_URL"].rstrip("/"), os.environ[f"TRIOSERVE_{name}_MODEL"]
        )
    except KeyError as error:
        raise pytest.UsageError(f"{error} is not set: run `python benchmarks/clients.py`") from None


@pytest.fixture(scope="session")
def text() -> Endpoint:
    """A small model that chats, and knows nothing of tools."""
    return _endpoint("TEXT")


@pytest.fixture(scope="session")
def tools() -> Endpoint:
    """A model that was trained to call tools."""
    return _endpoint("TOOLS")


@pytest.fixture(scope="session")
def embeddings() -> Endpoint:
    """A model that embeds."""
    return _endpoint("EMBEDDINGS")


@pytest.fixture(scope="session")
def speech() -> Endpoint:
    """A model that hears."""
    return _endpoint("SPEECH")


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """When a client is done, so is the server."""
    yield
    for name in ("text", "tools", "embeddings", "speech"):
        if name in request.fixturenames:
            request.getfixturevalue(name).wait_until_idle()
