"""What pyproject.toml says of the packages is so."""

from __future__ import annotations

import tomllib
from pathlib import Path

import trioserve

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_installed() -> None:
    found = {
        ".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "trioserve").rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == {*found, "trioserve_kernels"}


def test_the_version_is_written_once() -> None:
    assert PROJECT["project"]["version"] == trioserve.__version__


def test_every_dependency_is_pinned_in_the_constraints() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    for requirement in (requirement for group in groups for requirement in group):
        name = requirement.split(">")[0].split("=")[0].split("<")[0].strip().lower().replace("_", "-")
        assert name in pinned or name == "pip", f"{name} is not in constraints.txt"
