"""From a request's body to its attrs class, with everything that is wrong with it in one error."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs
import msgspec

from trioserve.errors import InvalidRequestError
from trioserve.server.protocol.lists import shorten, structure_lists_quickly
from trioserve.server.protocol.refusals import HARMLESS, Refusal
from trioserve.structured_outputs import StructuredOutputsParams
from trioserve.structuring import FieldProblem, find_problems, make_converter

if TYPE_CHECKING:
    import cattrs

__all__ = ["Problem", "RequestReader", "read_object"]

T = TypeVar("T")

_logger = logging.getLogger("trioserve.server")


def _structure_output_form(value: dict[str, Any], _: object) -> StructuredOutputsParams:
    """By the class itself: it takes JSON's types, and words what it refuses."""
    known = attrs.fields_dict(StructuredOutputsParams)
    if unknown := sorted(value.keys() - known.keys()):
        raise InvalidRequestError(f"structured_outputs has unknown keys: {', '.join(map(repr, unknown))}.")
    return StructuredOutputsParams(**{name: given for name, given in value.items() if given is not None})


def _make_converter() -> cattrs.Converter:
    converter = make_converter(forbid_extra_keys=False)
    structure_lists_quickly(converter)
    converter.register_structure_hook(StructuredOutputsParams, _structure_output_form)
    return converter


_converter = _make_converter()


@attrs.frozen
class Problem:
    """One wrong field."""

    path: str
    """Such as `messages[0].content`; empty for the body itself."""
    sentence: str


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
      InvalidRequestError: it is no JSON, or no object.
    """
    try:
        with _gc_paused(if_needed=len(body) > _LARGE):
            values = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(values, dict):
        raise InvalidRequestError(f"The body must be a JSON object, got {shorten(values)}.")
    return values


_LARGE = 2**20


@contextmanager
def _gc_paused(*, if_needed: bool) -> Iterator[None]:
    """Millions of new lists would be searched for garbage over and over, ten times as long as making them."""
    if not (if_needed and gc.isenabled()):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@attrs.frozen(kw_only=True)
class RequestReader(Generic[T]):
    """How one API's requests are read."""

    kind: type[T]
    ranges: Mapping[str, attrs.Attribute[Any]]
    """Field -> the attribute whose converter and validator say which values are allowed."""
    refusals: tuple[Refusal, ...]
    """Fields we know and do not serve."""
    oversized: Callable[[Mapping[str, Any]], list[Problem]] = lambda _: []
    """What is too large to look at any closer: then nothing else is said."""
    shapes: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    """Field -> what `conflicts` demands of it alone, in keywords of JSON Schema: for the description."""
    conflicts: Callable[[T], list[Problem]]
    """What is wrong between fields; asked only if each field by itself is right."""

    def read(self, body: bytes) -> T:
        """The request of a body that is JSON.

        Raises:
          InvalidRequestError: of all wrong fields at once; `parameter` is the first one's path.
        """
        return self.read_values(read_object(body))

    def read_values(self, values: dict[str, Any]) -> T:
        """The same, of what JSON has given, or could have."""
        self._log_unknown(values)
        if problems := self.oversized(values):
            raise _refusal(problems)
        request, problems = self._structure(values)
        wrong = {problem.path.partition(".")[0].partition("[")[0] for problem in problems}
        given = values if request is None else _fields(request)
        problems += self._find_out_of_range(given, wrong)
        problems += [
            Problem(refusal.field, refusal.sentence(values[refusal.field]))
            for refusal in self.refusals
            if refusal.field in values and not refusal.allows(values[refusal.field])
        ]
        if request is not None and not problems:
            problems = self.conflicts(request)
        if request is None or problems:
            raise _refusal(problems)
        return request

    def _structure(self, values: dict[str, Any]) -> tuple[T | None, list[Problem]]:
        try:
            return _converter.structure(values, self.kind), []
        except Exception as error:  # cattrs raises groups of whatever the hooks raised
            return None, [_explain(problem) for problem in find_problems(error)]

    def _find_out_of_range(self, values: Mapping[str, Any], wrong: set[str]) -> list[Problem]:
        """`wrong` fields have a problem already and are left out."""
        problems = []
        for name, attribute in self.ranges.items():
            value = values.get(name)
            if value is None or name in wrong:
                continue
            try:
                _check(attribute, value)
            except InvalidRequestError as error:
                problems.append(Problem(name, str(error)))
        return problems

    def _log_unknown(self, values: dict[str, Any]) -> None:
        if not _logger.isEnabledFor(logging.DEBUG):
            return
        known = {field.name for field in attrs.fields(self.kind)}  # type: ignore[arg-type]  # kind is an attrs class
        known |= HARMLESS | {refusal.field for refusal in self.refusals}
        if unknown := sorted(values.keys() - known):
            _logger.debug("ignored unknown fields of %s: %s", self.kind.__name__, ", ".join(unknown))


def _refusal(problems: Sequence[Problem]) -> InvalidRequestError:
    sentences = " ".join(problem.sentence for problem in problems)
    return InvalidRequestError(sentences, parameter=problems[0].path or None)


def _fields(request: Any) -> dict[str, Any]:
    """The values as structured: 16.0 has become 16 where an integer was wanted."""
    return {field.name: getattr(request, field.name) for field in attrs.fields(type(request))}


def _check(attribute: attrs.Attribute[Any], value: object) -> None:
    """What `attribute` would say to `value` when its class is made."""
    convert: Callable[[Any], Any] | None = attribute.converter  # type: ignore[assignment]  # plain functions, all of them
    converted = value if convert is None else convert(value)
    if attribute.validator is not None:
        attribute.validator(None, attribute, converted)


def _explain(problem: FieldProblem) -> Problem:
    error = problem.error
    if not isinstance(error, InvalidRequestError):
        return Problem(problem.path, f"{problem.path or 'The body'} {problem.message}.")
    # Raised by an object's own class: its parameter goes on from the path of the object, or is its name.
    parts = (problem.path, error.parameter) if error.parameter != problem.path else (problem.path,)
    path = ".".join(part for part in parts if part)
    return Problem(path, str(error) if str(error).startswith(path) else f"{path}: {error}")
