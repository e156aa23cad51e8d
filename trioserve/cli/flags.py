"""Command-line flags, made from the attrs classes of `trioserve.args`.

The classes' converters do the parsing, so a flag takes what the keyword of the same name takes and refuses
it with the same words. Every mistake is told in one line that names the flag, the value and what is allowed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import attrs

from trioserve.args import RETIRED
from trioserve.errors import InvalidConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

__all__ = ["FlagParser", "flag_of"]

T = TypeVar("T")

_RETIRED_WITH_VALUE = {"swap_space"}

_CLOSE = 0.7
"""How much a flag must be like another to be taken for a slip, from 0 to 1."""

_ARGPARSE_MESSAGE = re.compile(r"argument (?P<flag>\S+): (?P<problem>.*)", re.DOTALL)
_NO_VALUE_TAKEN = re.compile(r"ignored explicit argument (?P<value>.*)", re.DOTALL)


def flag_of(field: str) -> str:
    """`max_model_len` is `--max-model-len`, and `log.level` is `--log.level`."""
    return "--" + field.replace("_", "-")


class FlagParser(argparse.ArgumentParser):
    """argparse with our rules: `-` and `_` are the same in a flag's name, names are never abbreviated, and a
    mistake is one line on stderr and exit code 2."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, usage=f"{prog} [flags]", description=description, allow_abbrev=False)
        # Flags of nested true or false, which may have a value as the keys beside them do.
        self._nested_switches: set[str] = set()

    # Declaring

    def add_schema(
        self,
        schema: type[Any],
        title: str,
        *,
        only: Collection[str] | None = None,
        repeated: Mapping[str, str] | None = None,
    ) -> None:
        """A flag for every field of this attrs class, or for these; `model` may also be given without one.
        `repeated` may be given several times, and are then lists: each with what the help says of that."""
        group = self.add_argument_group(title)
        hints = get_type_hints(schema)
        for attribute in attrs.fields(schema):
            if only is not None and attribute.name not in only:
                continue
            help_text = _with_default(attribute.metadata["help"], attribute.default)
            options: dict[str, Any] = {}
            if attribute.name == "model":
                self.usage = f"{self.prog} [MODEL] [flags]"
                group.add_argument("positional_model", metavar="MODEL", nargs="?", help=help_text)
            more = (repeated or {}).get(attribute.name)
            if more is not None:
                help_text, options = f"{help_text}; {more}", {"action": "append"}
            _add_flag(group, attribute.name, hints[attribute.name], help_text, **options)
            if (nested := _nested_class(hints[attribute.name])) is not None:
                _add_nested_flags(group, attribute.name, nested)
                self._nested_switches |= set(_switches_of(attribute.name, nested))

    def add_retired(self) -> None:
        """Hidden flags that give a warning line, and nothing else."""
        for name, reason in RETIRED.items():
            flags = [flag_of(name)] if name in _RETIRED_WITH_VALUE else [flag_of(name), flag_of("no-" + name)]
            self.add_argument(
                *flags,
                action=_RetiredAction,
                nargs=None if name in _RETIRED_WITH_VALUE else 0,
                dest=argparse.SUPPRESS,
                const=reason,
                help=argparse.SUPPRESS,
            )

    # Parsing

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The flags that were given, as text; exits if one is unknown."""
        namespace, unknown = self.parse_known_args(self._without_switch_values(_with_dashes(arguments)))
        for argument in sorted(unknown, key=lambda argument: not argument.startswith("-")):
            self.error(self._describe_unknown(argument))
        return namespace

    def _without_switch_values(self, arguments: Iterable[str]) -> list[str]:
        """`--log.access false` and `--log.access=false` as `--no-log.access`, and true as the bare flag."""
        plain: list[str] = []
        for argument in arguments:
            flag, equals, value = argument.partition("=")
            if not equals and plain and "--" not in plain:
                flag, value = plain[-1], argument
            if flag not in self._nested_switches or value not in {"true", "false"}:
                plain.append(argument)
                continue
            if not equals:
                plain.pop()
            plain.append(flag if value == "true" else f"--no-{flag.removeprefix('--')}")
        return plain

    def given(self, schema: type[Any], namespace: argparse.Namespace) -> dict[str, Any]:
        """The fields of `schema` that were given, in the form that its converters take."""
        hints = get_type_hints(schema)
        values = {}
        for attribute in attrs.fields(schema):
            value = _given_value(attribute.name, hints[attribute.name], vars(namespace))
            if value is not None:
                values[attribute.name] = value
        positional = getattr(namespace, "positional_model", None)
        if "model" in hints and positional is not None:
            given = values.setdefault("model", positional)
            if given not in (positional, [positional]):
                shown = given if isinstance(given, str) else ", ".join(given)
                self.error(f"--model: must be the same as MODEL, {positional!r}, got {shown!r}")
        return values

    def build(self, schema: type[T], values: Mapping[str, Any]) -> T:
        """`schema(**values)`; exits, naming the flag, if a value is wrong."""
        try:
            return schema(**values)
        except InvalidConfigError as error:
            problem = str(error).removeprefix(error.field).strip().removesuffix(".")
            self.error(f"{flag_of(error.field)}: {problem}")

    def error(self, message: str) -> NoReturn:
        """One line on stderr, and exit code 2."""
        match = _ARGPARSE_MESSAGE.fullmatch(message)
        if match is not None:
            message = f"{match['flag']}: {self._reword(match['flag'], match['problem'])}"
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")

    def _reword(self, flag: str, problem: str) -> str:
        if match := _NO_VALUE_TAKEN.fullmatch(problem):
            return f"takes no value, got {match['value']}"
        if problem.startswith("expected"):
            for action in self._actions:
                if flag == "/".join(action.option_strings):
                    return f"needs a value: {action.help}"
        return problem

    def _describe_unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"{argument!r}: not expected; one MODEL is taken, and values follow their flag"
        flag = argument.partition("=")[0]
        known = [name for action in self._actions for name in action.option_strings]
        near = difflib.get_close_matches(flag, known, n=1, cutoff=_CLOSE)
        return f"{flag}: unknown flag" + (
            f"; did you mean {near[0]}?" if near else f"; see {self.prog} --help"
        )


class _RetiredAction(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        print(
            f"{parser.prog}: warning: {option_string} is retired and ignored: {self.const}", file=sys.stderr
        )


def _with_dashes(arguments: Iterable[str]) -> Iterator[str]:
    """Flags' names with `-` for `_`; their values, and all after a bare `--`, as they are."""
    arguments = iter(arguments)
    for argument in arguments:
        if argument == "--":
            yield argument
            break
        name, equals, value = argument.partition("=")
        yield name.replace("_", "-") + equals + value if name.startswith("--") else argument
    yield from arguments


def _add_flag(group: argparse._ArgumentGroup, field: str, kind: Any, help_text: str, **options: Any) -> None:
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = _metavar_of(kind)
    if get_origin(kind) is tuple:
        options |= {"nargs": "+", "action": "extend"}
    group.add_argument(
        flag_of(field),
        dest=field,
        default=argparse.SUPPRESS,
        help=help_text.replace("%", "%%"),
        **options,
    )


def _add_nested_flags(group: argparse._ArgumentGroup, field: str, schema: type[Any]) -> None:
    hints = get_type_hints(schema)
    for attribute in attrs.fields(schema):
        kind = hints[attribute.name]
        choices = ", ".join(get_args(kind)) if get_origin(kind) is Literal else ""
        help_text = _with_default(choices, attribute.default)
        _add_flag(group, f"{field}.{attribute.name}", kind, help_text)


def _switches_of(field: str, schema: type[Any]) -> Iterator[str]:
    return (flag_of(f"{field}.{name}") for name, kind in get_type_hints(schema).items() if kind is bool)


def _with_default(help_text: str, default: Any) -> str:
    if default is None or default == () or isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return help_text
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, tuple):
        default = " ".join(default)  # as they are given
    return f"{help_text} [{default}]".strip()


def _nested_class(kind: Any) -> type[Any] | None:
    """The attrs class that a field holds, perhaps optionally; None if it holds something else."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return next((kind for kind in kinds if attrs.has(kind)), None)


def _metavar_of(kind: Any) -> str:
    if _nested_class(kind) is not None or get_origin(kind) is dict:
        return "JSON"
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return "N" if int in kinds else "X" if float in kinds else "TEXT"


def _given_value(field: str, kind: Any, given: Mapping[str, Any]) -> Any:
    """What was given for a field, None if nothing was; for a nested one, its JSON and its keys together."""
    value = given.get(field)
    nested = _nested_class(kind)
    if nested is None:
        return value
    hints = get_type_hints(nested)
    keys = {
        name: _nested_value(given[f"{field}.{name}"], hints[name])
        for name in hints
        if f"{field}.{name}" in given
    }
    return _merge(value, keys) if keys else value


def _nested_value(value: Any, kind: Any) -> Any:
    """A number where the key's type has numbers: nested classes take JSON's types, not text."""
    if not isinstance(value, str) or str in get_args(kind) or kind is str or get_origin(kind) is Literal:
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value  # for the converter to refuse


def _merge(text: str | None, keys: dict[str, Any]) -> Any:
    """The object that `text` is, with `keys` over it."""
    if text is None:
        return keys
    try:
        base = json.loads(text)
    except ValueError:
        return text  # for the converter to refuse
    return {**base, **keys} if isinstance(base, dict) else text
