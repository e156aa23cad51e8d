"""Our own programs for what must not happen in the API process: heavy imports, threads of other libraries.

A helper is a module with `if __name__ == "__main__": sys.exit(run_helper(work))`. It takes a JSON object on
stdin and leaves one on stdout: the result (exit code 0), or `{"error", "message"}` (exit code 1), which is
raised again where the helper was called.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from trioserve.errors import ModelNotSupportedError, ModelSourceError
from trioserve.model_sources.child_process import run_child

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["call_helper", "run_helper"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def call_helper(
    module: str,
    request: Mapping[str, Any],
    *,
    shows_progress: bool = False,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a helper to its end; returns its result. Cancellation: see `run_child`.

    shows_progress: its stderr is ours. environment: added to ours.

    Raises:
      ModelSourceError, ModelNotSupportedError: raised in the helper.
      ModelSourceError: the helper failed in another way.
    """
    done = run_child(
        [sys.executable, "-m", module],
        text=json.dumps({**request, "parent": os.getpid()}),
        stderr=2 if shows_progress else subprocess.PIPE,
        environment={**os.environ, **(environment or {})},
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ModelSourceError(f"{module} {_ending(done)}") from None
    if done.returncode == 0 and isinstance(answer, dict):
        return answer
    kind = ModelNotSupportedError if answer["error"] == ModelNotSupportedError.__name__ else ModelSourceError
    raise kind(answer["message"])


def _ending(done: subprocess.CompletedProcess[str]) -> str:
    code = done.returncode
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    lines = done.stderr.strip().splitlines()
    return f"{ended}: {lines[-1]}" if lines else f"{ended}, without a message."


def run_helper(work: Callable[[dict[str, Any]], Mapping[str, Any]]) -> int:
    """The helper's side: `work` takes the request and returns the result. Returns the exit code."""
    request = json.load(sys.stdin)
    _end_with_parent(request.pop("parent"))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # libraries may print; stdout is for the answer
            answer, code = work(request), 0
    except (ModelSourceError, ModelNotSupportedError) as error:
        answer, code = {"error": type(error).__name__, "message": str(error)}, 1
    json.dump(answer, sys.stdout)
    return code


def _end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent has died.

    The kernel means the thread that started us; that one waits in `run_child` for as long as we run.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        sys.exit("the process that asked for this has ended")
