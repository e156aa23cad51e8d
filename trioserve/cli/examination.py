"""What `trioserve doctor` looks at. Nothing here imports torch, fetches anything or starts an engine.

A GGUF file that was never served is converted into the cache, to see whether it can be.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from trioserve.errors import TrioserveError
from trioserve.model_sources import PACKAGED_MODELS, SilentProgress, resolve_model
from trioserve.model_sources.cache import cache_root
from trioserve.model_sources.wheels import installed_file
from trioserve.version import __version__
from trioserve.worker.memory import available_memory
from trioserve.worker.weights_size import weights_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trioserve.args import EngineArgs

__all__ = ["Section", "examine_all", "examine_machine"]

_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "llguidance", "trio", "hypercorn", "quart-trio",
    "msgspec", "attrs",
)  # fmt: skip

_INSTRUCTION_SETS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
"""As /proc/cpuinfo spells them: those that matter for the speed of a model."""


@attrs.frozen
class Section:
    """A part of the report."""

    title: str
    rows: Sequence[tuple[str, str]]
    problems: Sequence[str] = ()

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        return "\n".join([self.title, *(f"  {name:{width}}  {value}" for name, value in self.rows)])


def examine_all(args: EngineArgs) -> list[Section]:
    """Every section; one that cannot be examined on this machine is a problem, and not the others' end."""
    examinations: list[tuple[str, Callable[[], Section]]] = [
        ("versions", examine_versions),
        ("machine", examine_machine),
        ("model cache", examine_cache),
        ("model", lambda: examine_model(args)),
    ]
    return [_examined(title, examine) for title, examine in examinations]


def _examined(title: str, examine: Callable[[], Section]) -> Section:
    try:
        return examine()
    except (TrioserveError, OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        return Section(title, [("examined", "no")], [f"{title}: {error}"])


def examine_versions() -> Section:
    rows = [("trioserve", __version__), ("python", platform.python_version())]
    missing = []
    for package in _PACKAGES:
        try:
            rows.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"{package} is not installed")
    return Section("versions", rows, missing)


def examine_machine(root: Path = Path("/")) -> Section:
    """Of the machine whose /proc and /sys are under `root`."""
    cpu = _read_table(root / "proc/cpuinfo")
    memory, problems = _examine_memory(root)
    flags = cpu.get("flags", "").split()
    sets = [name for name in _INSTRUCTION_SETS if name in flags]
    return Section(
        "machine",
        [
            ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
            ("processor", cpu.get("model name", "unknown")),
            ("cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"),
            ("instructions", " ".join(sets) or "none that we know to be useful"),
            ("memory", memory),
        ],
        problems,
    )


def _examine_memory(root: Path) -> tuple[str, list[str]]:
    try:
        available = available_memory(root)
        total = int(_read_table(root / "proc/meminfo")["MemTotal"].split()[0]) * 1024
    except (OSError, LookupError, ValueError) as error:
        return "unknown", [f"cannot tell how much memory there is: {error}"]
    return f"{_gib(available)} available of {_gib(total)}", []


def examine_cache() -> Section:
    root = cache_root()
    rows = [("directory", str(root))]
    entries = [path for kind in ("packaged", "converted") for path in sorted((root / kind).glob("[!.]*"))]
    rows += [(path.parent.name, f"{path.name} ({_gib(_size_of(path.rglob('*')))})") for path in entries]
    existing = next(path for path in (root, *root.parents) if path.exists())
    return Section("model cache", [*rows, ("free on disk", _gib(shutil.disk_usage(existing).free))])


def examine_model(args: EngineArgs) -> Section:
    """Whether this model can be served. One that would have to be fetched first is left where it is."""
    rows = [("name", args.model)]
    if (source := _source_of_unfetched(args.model)) is not None:
        return Section("model", [*rows, ("on this machine", f"not known; serving it gets it from {source}")])
    try:
        model = resolve_model(args.create_engine_config().model, SilentProgress())
        size = weights_size(model)
    except TrioserveError as error:
        return Section("model", rows, [str(error)])
    available = available_memory()
    rows += [
        ("architecture", f"{model.architecture} in {model.precision}"),
        ("tasks", ", ".join(model.tasks)),
        ("directory", model.directory),
        ("weights", _gib(size)),
        ("context", f"{model.max_model_len} tokens"),
    ]
    if size < available:
        return Section("model", [*rows, ("can be served", "yes")])
    problem = f"the weights take {_gib(size)} of memory, and {_gib(available)} are available"
    return Section("model", [*rows, ("can be served", "no")], [problem])


def _source_of_unfetched(name: str) -> str | None:
    """Where a model would be fetched from; None if it is on this machine, or nowhere."""
    if Path(name).expanduser().exists():
        return None
    model = PACKAGED_MODELS.get(name)
    if model is None:
        return "the hub" if name.count("/") == 1 else None
    members = [member for file in model.files for member in file.members]
    if all(installed_file(member.requirement, member.path) is not None for member in members):
        return None
    if any((cache_root() / "packaged").glob(f"{name}-*")):
        return None
    return ", ".join(map(str, model.requirements))


def _read_table(path: Path) -> dict[str, str]:
    """Lines of `name: value`; of several with one name the first. Empty if there is no such file."""
    table: dict[str, str] = {}
    try:
        text = path.read_text()
    except OSError:
        return table
    for line in text.splitlines():
        name, _, value = line.partition(":")
        table.setdefault(name.strip(), value.strip())
    return table


def _size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
