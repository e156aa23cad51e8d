"""Everything at once, for a minute: `benchmarks/soak.py`, which says itself what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parent.parent / "benchmarks" / "soak.py"


def test_a_minute_of_everything_leaves_nothing_behind() -> None:
    run = subprocess.run(
        [sys.executable, str(SOAK), "--seconds", "60", "--rate", "4", "--kills", "3", "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "SIGSTOP" in run.stdout, run.stdout
