"""A helper process for the tests: kills itself, or says its pid and waits to be killed."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from trioserve.model_sources.helper_process import run_helper


def wait(request: dict[str, Any]) -> dict[str, Any]:
    if request.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    print(os.getpid(), file=sys.stderr, flush=True)
    signal.pause()
    return request


if __name__ == "__main__":
    sys.exit(run_helper(wait))
