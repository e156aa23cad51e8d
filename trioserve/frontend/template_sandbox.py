"""Where chat templates are rendered: Jinja's immutable sandbox, with limits on time and size.

The sandbox keeps a template from Python's internals, but not from `"a" * 10**9` or loops without end; see
https://jinja.palletsprojects.com/en/stable/sandbox/#security-considerations. So the code that Jinja makes of
a template asks for the limits (`template_limits`) wherever it loops, calls, joins or compares.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import jinja2.compiler
import jinja2.nodes
import jinja2.sandbox
from jinja2 import pass_context

from trioserve.frontend.template_limits import TemplateLimitError, limits, text_size
from trioserve.frontend.template_operations import (
    FILTERS,
    check_call,
    check_operator,
    foresee_formatting,
    join_texts,
    limited,
    limited_filter,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import CodeType

    from jinja2.compiler import Frame
    from jinja2.ext import Extension
    from jinja2.runtime import Context

__all__ = ["TemplateEnvironment"]

_GLOBALS = ("cycler", "dict", "joiner", "namespace", "range")


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Jinja's own, with a call into the environment where there is a limit to watch."""

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: Frame) -> None:
        if frame.loop_frame:
            self.writeline("environment.tick()")
        super().blockvisit(nodes, frame)

    def visit_For(self, node: jinja2.nodes.For, frame: Frame) -> None:  # noqa: N802 - Jinja's interface
        if node.test is not None:  # items that it leaves out do not come to the loop's body
            ticks = jinja2.nodes.EnvironmentAttribute("tick_at_test")
            node.test = jinja2.nodes.And(jinja2.nodes.Call(ticks, [], [], None, None), node.test)
        super().visit_For(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self._wrap("concat", super().visit_Tuple, jinja2.nodes.Tuple(node.nodes, "load"), frame)

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("(")
        self._wrap("comparable", self.visit, node.expr, frame)
        for operand in node.ops:
            self.write(f" {jinja2.compiler.operators[operand.op]} ")
            self._wrap("comparable", self.visit, operand.expr, frame)
        self.write(")")

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, jinja2.nodes.Slice):
            self._wrap("charge", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_List(self, node: jinja2.nodes.List, frame: Frame) -> None:  # noqa: N802
        self._wrap("charge", super().visit_List, node, frame)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._wrap("charge", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("environment.charge({")
        for item in node.items:
            self._wrap("key", self.visit, item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("})")

    def _wrap(self, method: str, visit: Callable[[Any, Frame], Any], node: Any, frame: Frame) -> None:
        self.write(f"environment.{method}(")
        visit(node, frame)
        self.write(")")


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment whose templates can be rendered, and compiled, within `rendering_limits` only.

    They raise `jinja2.TemplateError`, of which `TemplateLimitError` is one, and whatever Python raises for
    a wrong operation. They have no loader: other templates and files are out of reach.
    """

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(join_texts)

    def __init__(
        self,
        *,
        extensions: Sequence[type[Extension]],
        filters: Mapping[str, Callable[..., Any]],
        functions: Mapping[str, Callable[..., Any]],
        max_code: int | None = None,
    ) -> None:
        """`filters` take the place of Jinja's, `functions` are there beside Jinja's own. `max_code` is how
        many characters of Python a template may become."""
        # Constants are not folded: that would be done while compiling.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, finalize=_finalize
        )
        self._max_code = max_code
        known = {**self.filters, **filters}
        self.filters = {name: limited_filter(name, known[name]) for name in FILTERS}
        self.tests = {name: limited(cast("Any", test), _check_test) for name, test in self.tests.items()}
        self.globals = {name: self.globals[name] for name in _GLOBALS} | dict(functions)

    def _compile(self, source: str, filename: str) -> CodeType:
        """Jinja's hook between its compiler and Python's."""
        if self._max_code is not None and len(source) > self._max_code:
            raise TemplateLimitError("it is too complex")
        return super()._compile(source, filename)

    # Called by the code that the generator above makes.

    def tick(self) -> None:
        limits().tick()

    def tick_at_test(self) -> bool:
        limits().tick()
        return True

    def charge(self, value: Any) -> Any:
        return limits().charge(value)

    def key(self, value: Any) -> Any:
        if isinstance(value, tuple):
            raise TemplateLimitError("a tuple cannot be a key")
        return value

    def comparable(self, value: Any) -> Any:
        if isinstance(value, list | tuple | dict):
            text_size(value)
        return value

    # The sandbox's hooks.

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return limits().charge(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self.key(argument))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Macros and such, too, are Python functions in the end, and nobody needs what hangs on them.
        return not isinstance(obj, FunctionType) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        form = str(value.__self__)

        def call(*arguments: Any, **named: Any) -> str:
            foresee_formatting(form, (arguments, named))
            return formatted(*arguments, **named)

        return call

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        allowance = limits()
        allowance.tick()
        check_call(__obj, args, kwargs)
        return allowance.charge(super().call(__context, __obj, *args, **kwargs))


def _check_test(*arguments: Any, **named: Any) -> None:
    for value in arguments:
        if isinstance(value, list | tuple | dict):
            text_size(value)


@pass_context
def _finalize(_: Context, value: Any) -> Any:
    """Of what `{{ ... }}` writes. (Taking the context keeps Jinja from calling it while compiling.)"""
    if not isinstance(value, str):
        text_size(value)
    return value
