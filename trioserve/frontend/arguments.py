"""Checks of what users hand to a method: an argument of a wrong type is refused by its name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from trioserve.errors import InvalidRequestError
from trioserve.sampling_params import SamplingParams
from trioserve.validators import shown

__all__ = ["check_request_id", "check_type", "names_of", "sampling_params_or_default"]

T = TypeVar("T")


def check_type(name: str, value: object, kind: type[T]) -> T:
    """`value`, which must be of this class.

    Raises:
      InvalidRequestError: it is not; as do all functions here.
    """
    if not isinstance(value, kind):
        raise _wrong(name, f"a {kind.__name__}", value)
    return value


def sampling_params_or_default(params: SamplingParams | None, name: str = "params") -> SamplingParams:
    return SamplingParams() if params is None else check_type(name, params, SamplingParams)


def check_request_id(request_id: str | None) -> None:
    if request_id is not None and not isinstance(request_id, str):
        raise _wrong("request_id", "a string", request_id)


def names_of(argument: str, value: str | Iterable[str]) -> list[str]:
    """The names in a name or in several."""
    if isinstance(value, str):
        return [value]
    names = list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(name, str) for name in names):
        raise _wrong(argument, "a string or several", value)
    return names


def _wrong(name: str, allowed: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {allowed}, got {shown(value)}.", parameter=name)
