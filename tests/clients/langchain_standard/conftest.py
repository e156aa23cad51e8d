from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def disable_recording() -> bool:
    """No answers are kept as files, and none come from files."""
    return True
