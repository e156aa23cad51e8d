"""Forms with files in them (multipart/form-data, RFC 7578), read as they arrive.

werkzeug's decoder does the work. quart's own reader is not used: it keeps large files on disk, which blocks
the event loop, and has no limit for a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import trio
from quart import current_app, request
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from trioserve.errors import InvalidRequestError
from trioserve.server.errors import body_too_large, file_too_large, unsupported_content_type
from trioserve.server_args import FORM_FIELDS_SIZE

if TYPE_CHECKING:
    from werkzeug.sansio.multipart import Event

__all__ = ["Form", "read_form"]

_PIECE = 2**16
"""Bytes that are decoded at a time: some microseconds' work."""

_MAX_HELD = 4 * _PIECE
"""Bytes that the decoder holds; the headers of a part must fit in."""

_MAX_PARTS = 64


@attrs.frozen(kw_only=True)
class Form:
    fields: Mapping[str, list[str]]
    """All values of each name, in their order."""
    files: Mapping[str, bytes] = attrs.field(repr=False)


async def read_form(*, max_file_size: int) -> Form:
    """The form of the request at hand, whose path has a limit of its own in `App.body_limits`.

    Raises:
      ApiError: it is declared as something else (400), is too large or has too large a file (413).
      RequestTimeout: it did not come in the application's BODY_TIMEOUT (408).
      InvalidRequestError: it is no form.
    """
    if request.mimetype != "multipart/form-data":
        raise unsupported_content_type(request.headers.get("Content-Type"), allowed="multipart/form-data")
    boundary = request.mimetype_params.get("boundary", "")
    if not (boundary and boundary.isascii()):
        raise InvalidRequestError("The Content-Type of a form must have a boundary, in ASCII.")
    timeout = current_app.config["BODY_TIMEOUT"]
    with trio.move_on_after(math.inf if timeout is None else timeout):
        return await _read(_FormReader(boundary.encode(), max_file_size))
    raise RequestTimeout


async def _read(reader: _FormReader) -> Form:
    try:
        async for part in request.body:
            for start in range(0, len(part), _PIECE):
                reader.take(part[start : start + _PIECE])
                await trio.lowlevel.checkpoint()  # much of a body may be there already
    except RequestEntityTooLarge:
        raise body_too_large(request.max_content_length or 0) from None
    return reader.end()


class _FormReader:
    """Collects the parts of a form."""

    def __init__(self, boundary: bytes, max_file_size: int) -> None:
        self._decoder = MultipartDecoder(boundary, _MAX_HELD, max_parts=_MAX_PARTS)
        self._max_file_size = max_file_size
        self._fields: dict[str, list[str]] = {}
        self._files: dict[str, bytes] = {}
        self._part: Field | File | None = None
        self._pieces: list[bytes] = []
        self._size = 0  # of the part
        self._fields_size = 0

    def take(self, data: bytes) -> None:
        """The next bytes. Raises as `read_form` does."""
        self._decode(data)

    def end(self) -> Form:
        """There are no more. Raises as `read_form` does."""
        self._decode(None)
        return Form(fields=self._fields, files=self._files)

    def _decode(self, data: bytes | None) -> None:
        try:
            self._decoder.receive_data(data)
            event = self._decoder.next_event()
            while not isinstance(event, NeedData | Epilogue):
                self._handle(event)
                event = self._decoder.next_event()
        except InvalidRequestError:
            raise
        except ValueError as error:  # of the decoder
            raise InvalidRequestError(f"The body is no valid form: {error}.") from None

    def _handle(self, event: Event) -> None:
        match event:
            case Field() | File():
                self._begin(event)
            case Data():
                self._add(event.data)
                if not event.more_data:
                    self._finish()

    def _begin(self, part: Field | File) -> None:
        if not isinstance(part.name, str):  # whatever its type says
            raise InvalidRequestError("Every part of a form must have a name.")
        if isinstance(part, File) and part.name in self._files:
            raise InvalidRequestError(f"{part.name} must be one file, got several.", parameter=part.name)
        self._part, self._pieces, self._size = part, [], 0

    def _add(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        assert self._part is not None
        if isinstance(self._part, File):
            if self._size > self._max_file_size:
                raise file_too_large(self._part.name, self._max_file_size)
            return
        self._fields_size += len(data)
        if self._fields_size > FORM_FIELDS_SIZE:
            raise InvalidRequestError(
                f"All fields of a form but its files must have at most {FORM_FIELDS_SIZE} bytes."
            )

    def _finish(self) -> None:
        part, data = self._part, b"".join(self._pieces)
        self._pieces = []
        assert part is not None
        if isinstance(part, File):
            self._files[part.name] = data
            return
        try:
            self._fields.setdefault(part.name, []).append(data.decode())
        except UnicodeDecodeError:
            raise InvalidRequestError(f"{part.name} must be UTF-8.", parameter=part.name) from None
