"""What pyproject.toml says of the packages is so."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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


def test_the_public_names_are_those_that_a_type_checker_sees() -> None:
    module = ast.parse(Path(trioserve.__file__).read_text())
    imports = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom) and node.level == 0]
    seen = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in imports
        for alias in node.names
        if alias.asname
    }
    assert seen.keys() == set(trioserve.__all__)
    for name in seen.keys() - {"__version__"}:
        found = getattr(trioserve, name)
        assert f"{found.__module__}.{found.__qualname__}" == seen[name]


def test_a_name_that_is_not_public() -> None:
    with pytest.raises(AttributeError, match="'trioserve' has no attribute 'AsyncLM'"):
        trioserve.AsyncLM  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="AsyncLM"):
        from trioserve import AsyncLM  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("trioserve", "trio attrs msgspec"),
        ("trioserve.link.engine_process", "tokenizers jinja2 quart trioserve.frontend.requests"),
        ("trioserve.cli.serve", "quart numpy torch llguidance trioserve.server.app"),
        ("trioserve.cli.answering, trioserve.async_llm", "numpy torch transformers llguidance"),
        ("trioserve.model_sources.convert_gguf", "gguf torch transformers trioserve.async_llm"),
    ],
)
def test_a_process_imports_only_what_it_needs(modules: str, unwanted: str) -> None:
    """Else it starts later, and holds more memory: docs/performance.md."""
    code = f"import sys, {modules}; print(sorted(set({unwanted.split()}) & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
