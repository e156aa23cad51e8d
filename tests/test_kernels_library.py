"""The CPU engine's libraries are found, loaded if they fit, and refused with a reason if not."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import trioserve_kernels
from trioserve_kernels import native_library, native_structures
from trioserve_kernels.native import (
    FOLDER_VARIABLE,
    TIERS,
    Activation,
    Element,
    Format,
    KvFormat,
    NativeLibraryError,
    Phase,
    Source,
    available_tiers,
    load,
    processor_flags,
    runnable_tiers,
)
from trioserve_kernels.native_structures import API_VERSION, FUNCTIONS

if TYPE_CHECKING:
    import enum

SOURCES = Path(__file__).parent.parent / "kernels" / "cpu"
REBUILD = "python setup.py -q build_ext --inplace"


@pytest.fixture
def built() -> Path:
    if not available_tiers():
        pytest.skip("no library was built")
    return load("scalar").path.parent


# Which tiers there are


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", ["scalar"]),
        ("sse2 avx", ["scalar"]),
        ("avx2 fma f16c", ["avx2", "scalar"]),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq", ["avx2", "scalar"]),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni", ["avx512", "avx2", "scalar"]),
        # Tiles without AVX-512's bf16 are in no processor; such flags promise nothing.
        ("avx2 fma f16c amx_tile amx_bf16 amx_int8", ["avx2", "scalar"]),
    ],
)
def test_a_processor_runs_the_tiers_whose_flags_it_has(flags: str, expected: list[str]) -> None:
    assert list(runnable_tiers(flags.split())) == expected


def test_a_processor_with_everything_runs_all_tiers() -> None:
    assert runnable_tiers(frozenset().union(*TIERS.values())) == tuple(TIERS)


def test_without_flags_only_the_scalar_tier_runs(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "processor_flags", frozenset)
    assert available_tiers() == ("scalar",)
    with pytest.raises(NativeLibraryError, match="cannot run the avx2 kernels: it lacks avx2, f16c, fma"):
        load("avx2")


def test_what_is_there_can_be_loaded_and_is_of_this_version(built: Path) -> None:
    assert set(available_tiers()) <= set(runnable_tiers(processor_flags()))
    for tier in available_tiers():
        library = load(tier)
        assert (library.tier, library.path) == (tier, built / f"_cpu_{tier}.so")
        assert library.functions.ts_api_version() == API_VERSION


# Refusals


def test_there_is_no_such_tier() -> None:
    with pytest.raises(ValueError, match=r"tier is 'sse'; it must be one of amx, .*scalar"):
        load("sse")


def test_a_library_that_was_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert available_tiers() == ()
    with pytest.raises(NativeLibraryError, match=REBUILD) as caught:
        load("scalar")
    assert str(tmp_path / "_cpu_scalar.so") in str(caught.value)


def test_a_library_of_another_version(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "API_VERSION", API_VERSION + 1)
    assert available_tiers() == ()
    expected = f"has version {API_VERSION} of the interface, {API_VERSION + 1} is needed: .*{REBUILD}"
    with pytest.raises(NativeLibraryError, match=expected):
        load("scalar")


def test_a_library_without_a_function(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FUNCTIONS, "ts_of_tomorrow", (None, ()))
    with pytest.raises(NativeLibraryError, match=rf"ts_of_tomorrow.*{REBUILD}"):
        load("scalar")


def test_a_file_that_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    (tmp_path / "_cpu_scalar.so").write_text("half a download")
    assert available_tiers() == ()
    with pytest.raises(NativeLibraryError, match=rf"_cpu_scalar.so cannot be used .*{REBUILD}"):
        load("scalar")


def test_another_folder(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(built / "_cpu_scalar.so", tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert available_tiers() == ("scalar",)
    assert load("scalar").path == tmp_path / "_cpu_scalar.so"


# The mirror of the header


def without_comments(name: str) -> str:
    return re.sub(r"//.*", "", (SOURCES / name).read_text())


HEADER = without_comments("api.h")


def declared(argument: str) -> str:
    """A C declaration's type, as ctypes names it."""
    if "*" in argument:
        return "address"
    word = argument.split(maxsplit=1)[0]
    return {
        "int32_t": "c_int",
        "size_t": "c_ulong",
        "float": "c_float",
        "double": "c_double",
        "void": "None",
    }[word]


def mirrored(ctype: type | None) -> str:
    if ctype is ctypes.c_void_p or (ctype is not None and hasattr(ctype, "contents")):
        return "address"
    return "None" if ctype is None else ctype.__name__


def test_the_version_is_the_headers() -> None:
    assert f"#define TS_API_VERSION {API_VERSION}\n" in HEADER


@pytest.mark.parametrize(
    ("name", "mirror"),
    [
        ("ts_decoder_shape", native_structures.ShapeStructure),
        ("ts_layer", native_structures.LayerStructure),
        ("ts_step", native_structures.StepStructure),
        ("ts_encoder_shape", native_structures.EncoderShapeStructure),
        ("ts_encoder_layer", native_structures.EncoderLayerStructure),
        ("ts_embedding", native_structures.EmbeddingStructure),
    ],
)
def test_structures_are_the_headers(name: str, mirror: type[ctypes.Structure]) -> None:
    (body,) = re.findall(r"typedef struct \{([^}]*)\} " + name, HEADER)
    fields = []
    for declaration in body.split(";")[:-1]:
        ((kind, names),) = re.findall(r"^\s*(?:const )?(\w+)(.*)", declaration, re.DOTALL)
        fields += [(field.strip(" *\n"), declared(kind + field)) for field in names.split(",")]
    assert [(field[0], mirrored(field[1])) for field in mirror._fields_] == fields


def test_functions_are_the_headers() -> None:
    found = {}
    for result, name, arguments in re.findall(r"^(\w+[ *]+)(ts_\w+)\(([^)]*)\);", HEADER, re.MULTILINE):
        listed = [] if arguments == "void" else arguments.split(",")
        found[name] = (declared(result), [declared(argument.replace("const ", "")) for argument in listed])
    mirror = {
        name: (mirrored(result), [mirrored(argument) for argument in arguments])
        for name, (result, arguments) in FUNCTIONS.items()
    }
    assert found == mirror


def numbered(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"(\w+) = (\d+)", text)}


@pytest.mark.parametrize(
    ("header", "start", "mirror"),
    [
        ("format.h", "enum class Format", Format),
        ("source.h", "enum class Source", Source),
        ("kv_cache.h", "enum class KvFormat", KvFormat),
    ],
)
def test_numbers_are_the_headers(header: str, start: str, mirror: type[enum.IntEnum]) -> None:
    (body,) = re.findall(start + r"[^{]*\{([^}]*)\}", without_comments(header))
    assert numbered(body) == {member.name.lower(): member.value for member in mirror}


def test_numbers_of_activations_elements_and_phases_are_the_headers() -> None:
    assert numbered(HEADER) == {f"TS_{member.name}": member.value for member in Activation}
    (phases,) = re.findall(r"enum \{ (TS_TIME_[^}]*) \}", HEADER)
    assert re.findall(r"TS_TIME_(\w+)", phases) == [phase.name for phase in Phase]
    comment = re.search(r"int32_t element; *// .*: 0 fp32, 1 bf16", (SOURCES / "api.h").read_text())
    assert comment
    assert (Element.F32, Element.BF16) == (0, 1)


def test_the_libraries_lie_beside_the_package(built: Path) -> None:
    assert built == Path(trioserve_kernels.__file__).parent or FOLDER_VARIABLE in os.environ
