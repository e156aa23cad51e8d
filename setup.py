"""Builds the CPU engine: a library for each tier of processors (kernels/cpu/README.md).

All else about the package is in pyproject.toml. Without a C++17 compiler it is installed all the same; models
then run by torch. `python setup.py -q build_ext --inplace` builds what has changed, beside the sources.

Environment: CXX, the compiler; CXXFLAGS, what comes behind our own flags.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = "kernels/cpu"
PREFIX = "trioserve_kernels._cpu_"
COMMON = [
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"),
    "-ffp-contract=off",  # multiply and add are one operation only where the source says so
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
AVX512_BF16 = [*AVX512, "-mavx512bf16"]
AMX = [*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
TIERS = {"scalar": [], "avx2": AVX2, "avx512": AVX512, "avx512_bf16": AVX512_BF16, "amx": AMX}


def tiers() -> dict[str, list[str]]:
    """The tiers that this machine's kind of processor can have, and their compiler flags."""
    if platform.machine() in {"x86_64", "AMD64"}:
        return TIERS
    return {"scalar": TIERS["scalar"]}


class BuildLibraries(build_ext):
    """Compiles and links plain shared libraries. Compiles only what has changed, several files at a time."""

    user_options: ClassVar = [
        *build_ext.user_options,
        ("required", None, "fail if a library cannot be built (default when called with --inplace)"),
        ("tiers=", None, "build only these (comma-separated)"),
    ]
    boolean_options: ClassVar = [*build_ext.boolean_options, "required"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.required = False
        self.tiers: str | None = None

    def finalize_options(self) -> None:
        super().finalize_options()
        self.required = self.required or (self.inplace and not self.editable_mode)
        if self.tiers is not None:
            wanted = {f"{PREFIX}{tier}" for tier in self.tiers.split(",")}
            self.extensions = [ext for ext in self.extensions if ext.name in wanted]

    def get_ext_filename(self, fullname: str) -> str:
        """They have nothing of Python in them, so their names have not either."""
        return fullname.replace(".", os.sep) + ".so"

    def build_extensions(self) -> None:
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        libraries = [Library(ext, Path(self.get_ext_fullpath(ext.name)), folder) for ext in self.extensions]
        with only_one(folder), ThreadPoolExecutor(os.cpu_count()) as threads:
            # The objects of all at once, so that the last files of one library leave no processor idle.
            jobs = [[threads.submit(one.compile, made) for made in one.stale()] for one in libraries]
            built = [
                library.link(all(job.result() for job in own))
                for library, own in zip(libraries, jobs, strict=True)
            ]
        self.extensions = list(compress(self.extensions, built))
        self._report([library.path.name for library, good in zip(libraries, built, strict=True) if not good])

    def _report(self, missing: list[str]) -> None:
        if missing and self.required:
            sys.exit(f"could not build {', '.join(missing)}")
        for name in missing:
            print(f"warning: could not build {name}; trioserve works without it", file=sys.stderr)

    def copy_extensions_to_source(self) -> None:
        """Each replaced in one go: processes may be running the old one."""
        sources = self.get_finalized_command("build_py")
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(ext.name))
            target = Path(sources.get_package_dir("trioserve_kernels")) / built.name
            self.copy_file(str(built), str(target.with_suffix(".new")))
            target.with_suffix(".new").replace(target)


class Library:
    """One tier's library, and how it comes about."""

    def __init__(self, ext: Extension, path: Path, folder: Path) -> None:
        self.path = path
        self._folder = folder / path.stem
        self._objects = {self._folder / f"{Path(source).stem}.o": source for source in ext.sources}
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        flags = shlex.split(os.environ.get("CXXFLAGS", ""))
        self._compile = [*compiler, *COMMON, *ext.extra_compile_args, *flags, "-MMD", "-c"]
        self._link = [*compiler, "-shared", "-pthread", "-Wl,-z,defs", *flags]

    def stale(self) -> list[Path]:
        """The objects to compile: all of them if the command has changed."""
        self._folder.mkdir(exist_ok=True)
        before = self._folder / "command"
        command = shlex.join(self._compile)
        if not before.exists() or before.read_text() != command:
            for made in self._objects:
                made.unlink(missing_ok=True)
            before.write_text(command)
        return [made for made in self._objects if not is_up_to_date(made)]

    def compile(self, made: Path) -> bool:
        """Whether it went well. The object is as old as what was read: sources may change meanwhile."""
        begin = time.time_ns()
        good = run([*self._compile, self._objects[made], "-o", str(made)])
        if good:
            os.utime(made, ns=(begin, begin))
        return good

    def link(self, compiled: bool) -> bool:
        """Whether it went well. If not, no older one is left."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        return compiled and run([*self._link, *map(str, self._objects), "-o", str(self.path)])


def is_up_to_date(made: Path) -> bool:
    """By the list of sources and headers that the compiler wrote beside the object."""
    if not made.exists():
        return False
    used = made.with_suffix(".d").read_text().replace("\\\n", " ").split()[1:]
    changed = [file.stat().st_mtime_ns if file.exists() else float("inf") for file in map(Path, used)]
    return max(changed) < made.stat().st_mtime_ns


def run(command: list[str]) -> bool:
    """Whether it went well. What the compiler has to say goes to stderr."""
    try:
        return subprocess.run(command, check=False).returncode == 0
    except FileNotFoundError:
        print(f"no compiler {command[0]!r}", file=sys.stderr)
        return False


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Another build in the same folder waits."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class PlatformWheel(bdist_wheel):
    """For any Python 3 on this platform: the libraries have nothing of one version in them."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def libraries() -> list[Extension]:
    sources = sorted(str(path) for path in Path(SOURCES).glob("*.cpp"))
    headers = sorted(str(path) for path in Path(SOURCES).glob("*.h"))
    return [
        Extension(
            f"{PREFIX}{tier}",
            sources,
            depends=headers,  # an sdist has them
            extra_compile_args=flags,
            optional=True,
        )
        for tier, flags in tiers().items()
    ]


setup(ext_modules=libraries(), cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel})
