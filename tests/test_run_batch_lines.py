"""Reading a batch's input line by line, and what is wrong with a line."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import trio

import trioserve.batch.line_reader
from helpers_batch import request_line
from trioserve.batch.line_reader import Line, LineReader, count_lines
from trioserve.batch.lines import WrongLineError, parse_request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def opened(path: Path, content: bytes) -> Iterator[int]:
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


async def read_all(reader: LineReader) -> list[Line]:
    lines = []
    while (line := await reader.read()) is not None:
        lines.append(line)
    assert await reader.read() is None
    return lines


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize(
    "content", [b"", b"\n", b"one", b"one\n\ntwo three\n", b"\n\na\nbcdef\ngh", b"\xff\r\n"]
)
async def test_lines_are_the_same_whatever_is_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, content: bytes
) -> None:
    monkeypatch.setattr(trioserve.batch.line_reader, "_CHUNK", chunk)
    with opened(tmp_path / "file", content) as fd:
        lines = await read_all(LineReader(fd))
        assert await count_lines(fd) == len(lines)
    assert [line.number for line in lines] == list(range(1, len(lines) + 1))
    assert b"".join((line.content or b"") + b"\n" * line.is_ended for line in lines) == content
    for line in lines:
        assert content[line.start :].startswith(line.content or b"")


@pytest.mark.parametrize("chunk", [1, 4, 1000])
async def test_a_line_that_is_too_long_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(trioserve.batch.line_reader, "_CHUNK", chunk)
    with opened(tmp_path / "file", b"12345\n" + b"x" * 50 + b"\n123456\nabc") as fd:
        lines = await read_all(LineReader(fd, 5))
    assert [line.content for line in lines] == [b"12345", None, None, b"abc"]
    assert [line.start for line in lines] == [0, 6, 57, 64]


async def test_a_pipe_is_read_as_it_comes_and_not_counted() -> None:
    reading, writing = os.pipe()
    try:
        reader = LineReader(reading)
        os.write(writing, b"first\nsec")
        assert await reader.read() == Line(1, 0, b"first", True)
        with trio.move_on_after(0.01) as waiting:
            await reader.read()
        assert waiting.cancelled_caught
        os.write(writing, b"ond\n")
        assert await reader.read() == Line(2, 6, b"second", True)
        assert await count_lines(reading) is None
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    ("line", "code", "problem"),
    [
        ("nope", "invalid_json", "it is not a JSON object: "),
        ("[1]", "invalid_json", "it is not a JSON object: "),
        ('{"a": ' + "[" * 100_000, "invalid_json", "it is nested too deeply."),
        (b'{"custom_id": "\xff"}', "invalid_json", "it is not a JSON object: "),
        ("{}", "invalid_line", "custom_id is missing."),
        (request_line(7), "invalid_line", "custom_id must be a string, got '7'."),
        ('{"custom_id": "\\ud800"}', "invalid_json", "it is not a JSON object: "),
        (request_line(""), "invalid_line", "custom_id must not be empty."),
        (request_line("a", method="GET"), "invalid_method", "method must be POST, got 'GET'."),
        (request_line("a", method=None), "invalid_line", "method must be a string, got 'null'."),
        (request_line("a", url="/v1/models"), "invalid_url", "url must be one of /v1/chat/completions, "),
        (request_line("a", body=[1, 2]), "invalid_line", "body must be an object, got '[1, 2]'."),
        (request_line("a", body={"stream": True}), "stream_not_supported", "body.stream must not be true"),
        (
            request_line("a", body={"encoding_format": "bytes_only"}), "encoding_format_not_supported",
            "body.encoding_format must be float or base64",
        ),
        (request_line("a", body={"background": True}), "background_not_supported", "body.background must"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_line_is_told(line: str | bytes, code: str, problem: str) -> None:
    content = line.encode() if isinstance(line, str) else line
    with pytest.raises(WrongLineError) as caught:
        parse_request(12, content)
    detail = caught.value.detail
    assert (detail.code, detail.line) == (code, 12)
    assert detail.message.startswith(f"Line 12: {problem}")
    assert caught.value.custom_id == ("a" if '"a"' in str(line) and "custom_id" in str(line) else None)


def test_a_good_line() -> None:
    line = "\ufeff" + request_line("a", extra=[1], body={"prompt": "é", "stream": False}) + "\r"
    request = parse_request(1, line.encode())
    assert (request.custom_id, request.url) == ("a", "/v1/completions")
    assert request.body == b'{"prompt": "\\u00e9", "stream": false}'
