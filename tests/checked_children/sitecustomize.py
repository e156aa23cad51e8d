"""Python runs this at the start of each process of the tests' whose PYTHONPATH has this folder.

Once the process loads the application, what it answers is looked at: see `response_checks`. A process that
loads none does nothing more.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_APP = "trioserve.server.app"


class _Finder:
    """Finds the module of the application as Python does, and has it checked once it is loaded."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if name != _APP:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]  # it has all that is needed of a finder
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_check(module: ModuleType) -> None:
            load(module)
            _check_answers()

        spec.loader.exec_module = load_and_check  # type: ignore[method-assign]
        return spec


def _check_answers() -> None:
    sys.path.append(str(Path(__file__).parent.parent))
    from response_checks import check_this_process

    check_this_process()


if "TESTS_WRONG_ANSWERS" in os.environ:
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
