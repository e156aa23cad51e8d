"""The CPU engine from Python: `cpu/api.h` with its objects owned, its arguments checked.

For instance::

    library = load(available_tiers()[0])
    with ThreadPool(library, threads=2) as pool, PackedMatrix(library, columns=576) as matrix:
        matrix.add_segment(Format.BF16, 960)
        matrix.fill(pool, Source.BF16, weights, 960)
        y = matrix.multiply(pool, x)
"""

from __future__ import annotations

from trioserve_kernels.cpu_tiers import TIERS, processor_flags, runnable_tiers
from trioserve_kernels.native_decoder import Decoder, DecoderLayer, DecoderShape, gate_up_rows, step_of
from trioserve_kernels.native_embedding import NativeEmbedding
from trioserve_kernels.native_encoder import (
    EncoderLayer,
    EncoderShape,
    NativeEncoder,
    NormWeights,
)
from trioserve_kernels.native_library import (
    FOLDER_VARIABLE,
    Library,
    NativeLibraryError,
    available_tiers,
    load,
)
from trioserve_kernels.native_linear import LinearWeights, NativeLinear
from trioserve_kernels.native_matrix import PackedMatrix, Placement, dequantize, row_bytes
from trioserve_kernels.native_pool import ThreadPool
from trioserve_kernels.native_structures import (
    Activation,
    Element,
    Format,
    KvFormat,
    Phase,
    Source,
    StepStructure,
)

__all__ = [
    "FOLDER_VARIABLE",
    "TIERS",
    "Activation",
    "Decoder",
    "DecoderLayer",
    "DecoderShape",
    "Element",
    "EncoderLayer",
    "EncoderShape",
    "Format",
    "KvFormat",
    "Library",
    "LinearWeights",
    "NativeEmbedding",
    "NativeEncoder",
    "NativeLibraryError",
    "NativeLinear",
    "NormWeights",
    "PackedMatrix",
    "Phase",
    "Placement",
    "Source",
    "StepStructure",
    "ThreadPool",
    "available_tiers",
    "dequantize",
    "gate_up_rows",
    "load",
    "processor_flags",
    "row_bytes",
    "runnable_tiers",
    "step_of",
]
