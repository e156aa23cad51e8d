"""The API keys that a server accepts; only their digests are held."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from trioserve.arg_fields import KeyDigest
from trioserve.errors import InvalidConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trioserve.server_args import ServerArgs

__all__ = ["ApiKeys", "read_key_file"]


@attrs.frozen
class ApiKeys:
    """All of them; false if there are none."""

    _digests: tuple[KeyDigest, ...] = attrs.field(repr=False)

    @classmethod
    def of(cls, args: ServerArgs) -> ApiKeys:
        """Those given, and those of the file.

        Raises:
          InvalidConfigError: the file is no list of keys.
        """
        of_file = () if args.api_key_file is None else read_key_file(args.api_key_file)
        return cls((*args.api_key, *of_file))  # type: ignore[arg-type]  # ServerArgs keeps digests only

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, key: bytes) -> KeyDigest | None:
        """The digest of `key` if it is one of them. Takes the same time whichever it is, and if none is."""
        given = KeyDigest.of(key)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given if any(matches) else None


def read_key_file(path: str) -> tuple[KeyDigest, ...]:
    """The digests of a file's keys: one per line, blank lines and what follows a # are skipped.

    Blocks. Raises:
      InvalidConfigError: it cannot be read, holds no key, or a line is no key; no line is quoted.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise _wrong_file(path, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _wrong_file(path, "is not UTF-8 text") from None
    # No key at all must not mean that none is needed.
    if not (digests := tuple(_digests(path, lines))):
        raise _wrong_file(path, "holds no key")
    return digests


def _digests(path: str, lines: list[str]) -> Iterator[KeyDigest]:
    for number, line in enumerate(lines, 1):
        key, *rest = line.split() or ["#"]
        if key.startswith("#"):
            continue
        if rest and not rest[0].startswith("#"):
            raise _wrong_file(path, f"has more than one key in line {number}")
        yield KeyDigest.of(key.encode())


def _wrong_file(path: str, problem: str) -> InvalidConfigError:
    return InvalidConfigError(
        f"api_key_file must be a text file with one key per line; {path!r} {problem}.", field="api_key_file"
    )
