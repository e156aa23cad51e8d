"""`trioserve doctor`: what this installation and machine are, and whether a model can be served here.

With `--trace-step` it runs the model for a moment, and shows one step of the engine core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.args import EngineArgs
from trioserve.cli.examination import examine_all
from trioserve.cli.flags import FlagParser

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """The command; returns its exit code, 1 if something is wrong. Raises TrioserveError."""
    parser = FlagParser("trioserve doctor", "Tell whether a model can be served here, and what it runs on.")
    parser.add_argument(
        "--trace-step", action="store_true", help="run the model in process, and show one step of its engine"
    )
    parser.add_schema(EngineArgs, "engine")
    parser.add_retired()
    options = parser.parse(arguments)
    args = parser.build(EngineArgs, parser.given(EngineArgs, options))
    if options.trace_step:
        from trioserve.cli.step_trace import trace_step  # noqa: PLC0415 - only here the engine is needed

        print(trace_step(args))
        return 0
    return _examine(args)


def _examine(args: EngineArgs) -> int:
    sections = examine_all(args)
    print("\n\n".join(map(str, sections)))
    problems = [problem for section in sections for problem in section.problems]
    for problem in problems:
        print(f"\nproblem: {problem}")
    return 1 if problems else 0
