"""How far quantized weights are from fp32: perplexity, cosine of logits, agreement of the likeliest token.

    python benchmarks/quality.py MODEL [--gguf FILE ...] [--kernels auto amx avx512 ...] [--output FILE]

MODEL is a Hugging Face directory in bfloat16, or a GGUF file. It is computed in every form that a directory
can have (fp32, bf16, int8 and int4, int8 KV cache), and each GGUF file in its own. Compared with transformers
in fp32: on MODEL; and for a GGUF file also on the file's own weights, dequantized, which tells what our
computing costs apart from what the file's quantization does.

The text is benchmarks/texts/alice.txt: the first four chapters of Lewis Carroll's "Alice's Adventures in
Wonderland" (1865), in the public domain; its first 9 x 1,024 tokens, each window by itself. Needs 2 GB of
memory for each of the two references, beside the model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch
import transformers
from machine import describe_machine, git_commit
from quality_logits import Form, by_transformers, by_trioserve, windows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TEXT = Path(__file__).parent / "texts" / "alice.txt"
_ROWS = 256
"""Compared at a time: float64 copies of logits are large."""


@attrs.frozen(kw_only=True)
class Quality:
    perplexity: float
    cosine_mean: float
    cosine_p1: float
    """First percentile."""
    cosine_min: float
    agreement: float
    """Share of positions with the same likeliest token."""


@attrs.define
class Comparison:
    """Gathers windows."""

    losses: list[torch.Tensor] = attrs.field(factory=list)
    cosines: list[torch.Tensor] = attrs.field(factory=list)
    agreements: list[torch.Tensor] = attrs.field(factory=list)

    def add(self, logits: torch.Tensor, reference: torch.Tensor, window: Sequence[int]) -> None:
        """logits, reference: fp32 [size, vocabulary]."""
        following = torch.tensor([*window[1:], 0])
        for first in range(0, len(window), _ROWS):
            rows = slice(first, first + _ROWS)
            ours, theirs = logits[rows].double(), reference[rows].double()
            self.losses.append(torch.nn.functional.cross_entropy(ours, following[rows], reduction="none"))
            self.cosines.append(torch.nn.functional.cosine_similarity(ours, theirs, dim=1))
            self.agreements.append(ours.argmax(1) == theirs.argmax(1))
        self.losses[-1] = self.losses[-1][:-1]  # what follows the last token is in no window

    def result(self) -> Quality:
        cosines = torch.cat(self.cosines)
        return Quality(
            perplexity=math.exp(torch.cat(self.losses).mean()),
            cosine_mean=cosines.mean().item(),
            cosine_p1=cosines.sort().values[len(cosines) // 100].item(),
            cosine_min=cosines.min().item(),
            agreement=torch.cat(self.agreements).double().mean().item(),
        )


@attrs.frozen(kw_only=True)
class Measured:
    title: str
    kernels: str
    against_model: Quality
    against_file: Quality | None
    """GGUF: against its own weights."""


def main() -> None:
    args = parse()
    transformers.utils.logging.disable_progress_bar()
    windows = windows_of(TEXT.read_text(), args.model, args.window, args.windows)
    reference = by_transformers(args.model, windows)
    themselves = Comparison()
    for window, logits in zip(windows, reference, strict=True):
        themselves.add(logits, logits, window)
    print(f"transformers, fp32: perplexity {themselves.result().perplexity:.4f}", flush=True)
    measured = []
    for title, form in forms(args):
        for found in measure(title, form, args.kernels, windows, reference):
            measured.append(found)
            print(row(found, None), flush=True)
    print(table(measured))
    if args.output:
        args.output.write_text(json.dumps(report(args, themselves.result(), measured), indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--gguf", nargs="*", default=[], help="files of the same model")
    parser.add_argument("--kernels", nargs="+", default=["auto"], help="as --cpu-kernels takes them")
    parser.add_argument("--forms", nargs="*", help="some of what the table's first column has")
    parser.add_argument("--window", type=int, default=1024, help="tokens")
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser.parse_args()


def forms(args: argparse.Namespace) -> Iterator[tuple[str, Form]]:
    possible: dict[str, Form] = {}
    if Path(args.model).is_dir():
        half = Form(model=args.model, dtype="bfloat16", quantization="none")
        possible["fp32"] = attrs.evolve(half, dtype="float32")
        possible["bf16"] = half
        possible["bf16, int8 KV"] = attrs.evolve(half, kv_cache_dtype="int8")
        for quantization in ("int8", "int4"):
            possible[quantization] = attrs.evolve(half, quantization=quantization)
        possible["int8, int8 KV"] = attrs.evolve(possible["int8"], kv_cache_dtype="int8")
    for file in args.gguf:
        possible[Path(file).stem] = Form(model=file)
    for title, form in possible.items():
        if not args.forms or title in args.forms:
            yield title, form


def measure(
    title: str,
    form: Form,
    kernels: Sequence[str],
    windows: Sequence[Sequence[int]],
    reference: Sequence[torch.Tensor],
) -> Iterator[Measured]:
    """With each of the kernels."""
    own = by_transformers(form.model, windows) if Path(form.model).is_file() else None
    for name in kernels:
        with_model, with_file = Comparison(), Comparison()
        with by_trioserve(attrs.evolve(form, cpu_kernels=name), len(windows[0])) as logits_of:
            for number, window in enumerate(windows):
                logits = logits_of(window)
                with_model.add(logits, reference[number], window)
                if own is not None:
                    with_file.add(logits, own[number], window)
        against_file = None if own is None else with_file.result()
        yield Measured(
            title=title, kernels=name, against_model=with_model.result(), against_file=against_file
        )


def table(measured: Sequence[Measured]) -> str:
    """bf16's perplexity, where it is among them, is what the others' is told relative to."""
    heads = [
        "",
        "kernels",
        "perplexity",
        "against bf16",
        "cosine mean",
        "1st percentile",
        "least",
        "agreement",
    ]
    lines = ["", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    base = next((found.against_model.perplexity for found in measured if found.title == "bf16"), None)
    return "\n".join([*lines, *(row(found, base) for found in measured)])


def row(measured: Measured, base: float | None) -> str:
    """A GGUF file has a second one: against its own weights."""
    quality = measured.against_model
    relative = "" if base is None else f"{quality.perplexity / base - 1:+.2%}"
    perplexity = f"{quality.perplexity:.3f}"
    lines = [_line([measured.title, measured.kernels, perplexity, relative, *_cells(quality)])]
    if measured.against_file is not None:
        title = f"{measured.title}, against its own weights"
        lines.append(_line([title, measured.kernels, "", "", *_cells(measured.against_file)]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(quality: Quality) -> list[str]:
    cosines = (quality.cosine_mean, quality.cosine_p1, quality.cosine_min)
    return [*(f"{cosine:.5f}" for cosine in cosines), f"{quality.agreement:.2%}"]


def report(args: argparse.Namespace, reference: Quality, measured: Sequence[Measured]) -> dict[str, object]:
    return {
        "machine": describe_machine(),
        "commit": git_commit(),
        "model": os.path.basename(args.model),
        "windows": [args.windows, args.window],
        "fp32_perplexity": reference.perplexity,
        "measured": [attrs.asdict(found) for found in measured],
    }


if __name__ == "__main__":
    main()
