"""A server that clients are tried on. Only the standard library: this runs in every client's environment."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from dataclasses import dataclass

__all__ = ["KEY", "Endpoint"]

KEY = os.environ.get("TRIOSERVE_CLIENTS_KEY", "sk-clients")

_LEVELS = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_PATIENCE = 30.0
"""Seconds."""


@dataclass(frozen=True)
class Endpoint:
    """One server with one model."""

    url: str
    model: str
    key: str = KEY

    @property
    def api(self) -> str:
        """The base URL that most clients want."""
        return f"{self.url}/v1"

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        request = urllib.request.Request(
            f"{self.url}/metrics", headers={"Authorization": f"Bearer {self.key}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read().decode()
        pattern = rf"^trioserve:{name}(?:{{[^}}]*}})? (\S+)$"
        return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))

    def wait_until_idle(self) -> None:
        """Until nothing runs or waits, and no block is held."""
        deadline = time.monotonic() + _PATIENCE
        while any(map(self.metric, _LEVELS)):
            assert time.monotonic() < deadline, "the server is not idle"
            time.sleep(0.05)
