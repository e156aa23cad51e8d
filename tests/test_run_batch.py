"""A batch over a scripted engine: what becomes of each line, and what a second run does."""

from __future__ import annotations

import fcntl
import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from helpers_api import Answer, Client, FakeLLM
from helpers_batch import COMPLETIONS, BatchFolder, request_line, until
from helpers_pooling_api import FakePoolingLLM
from trioserve.batch.errors import BatchFileError
from trioserve.batch.lines import Result, WrongLine, WrongLineError
from trioserve.batch.output import open_output
from trioserve.errors import EngineDeadError, EngineRestartingError, OverloadedError

if TYPE_CHECKING:
    from pathlib import Path

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture
def folder(tmp_path: Path) -> BatchFolder:
    return BatchFolder(tmp_path)


class RefusingLLM(FakeLLM):
    """Has no room at first."""

    def __init__(self, refusals: list[OverloadedError]) -> None:
        super().__init__()
        self._refusals = refusals

    def check_room(self, num_sequences: int = 1) -> None:
        if self._refusals:
            raise self._refusals.pop()


def without_identity(body: Any) -> Any:
    """An answer without what differs from one to the next."""
    if isinstance(body, dict):
        names = {"id", "created", "created_at", "completed_at"}
        return {name: without_identity(value) for name, value in body.items() if name not in names}
    return [without_identity(value) for value in body] if isinstance(body, list) else body


async def test_answers_are_those_of_the_server(folder: BatchFolder) -> None:
    bodies = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}], "model": "small"},
        COMPLETIONS: {"prompt": ["one", "two words"], "model": "small", "logprobs": 1, "n": 2},
        RESPONSES: {"input": "hi", "model": "small", "store": False},
    }
    folder.write_input(*(request_line(url, url=url, body=body) for url, body in bodies.items()))
    tally = await folder.run()
    assert (tally.good, tally.errors, tally.earlier) == (3, 0, 0)
    client = Client(FakeLLM())
    for url, body in bodies.items():
        result = folder.by_id[url]
        assert result.keys() == {"id", "custom_id", "response", "error"}
        assert result["error"] is None
        response = result["response"]
        assert response["status_code"] == 200
        assert response["body"]["id"].endswith(response["request_id"]) or url == RESPONSES
        reply = await client.post(url, body)
        assert without_identity(response["body"]) == without_identity(reply.json)
    assert len({result["id"] for result in folder.results}) == 3
    assert (folder.progress.done, folder.progress.output_tokens) == (3, 3 + 12 + 3)
    assert not folder.llm.running


async def test_a_model_that_pools(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path, FakePoolingLLM())
    bodies = {
        "/v1/embeddings": {"input": ["a", "b c"], "model": "small", "encoding_format": "base64"},
        "/v1/rerank": {"query": "a", "documents": ["b", "cd"]},
        CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    }
    folder.write_input(*(request_line(url, url=url, body=body) for url, body in bodies.items()))
    tally = await folder.run()
    assert (tally.good, tally.errors) == (2, 1)
    client = Client(FakePoolingLLM())
    for url, body in bodies.items():
        response = folder.by_id[url]["response"]
        assert without_identity(response["body"]) == without_identity((await client.post(url, body)).json)
    assert folder.progress.input_tokens == 3 + 3


async def test_wrong_lines_and_wrong_requests_are_errors_of_their_own(folder: BatchFolder) -> None:
    folder.write_input(
        request_line("good"),
        "",
        "nope",
        request_line("good", body={"prompt": "again"}),
        request_line("unknown", url="/v1/models"),
        request_line("refused", body={"prompt": "x", "temperature": 9}),
        request_line("long", body={"prompt": "x" * 2000}),
    )
    tally = await folder.run(max_line=1000)
    assert (tally.good, tally.errors) == (1, 5)
    assert folder.progress.done == 7
    errors = {result["error"]["line"]: result for result in folder.results if result["error"]}
    assert {line: (found["custom_id"], found["error"]["code"]) for line, found in errors.items()} == {
        3: (None, "invalid_json"),
        4: ("good", "duplicate_custom_id"),
        5: ("unknown", "invalid_url"),
        7: (None, "line_too_long"),
    }
    assert all(found["response"] is None for found in errors.values())
    (refused,) = (result for result in folder.results if result["custom_id"] == "refused")
    assert refused["error"] is None
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    assert folder.asked == ["about good"]


async def test_a_second_run_asks_for_nothing_again(folder: BatchFolder) -> None:
    lines = [request_line("a"), "nope", request_line("a"), request_line("b", body={"prompt": ""})]
    folder.write_input(*lines)
    await folder.run()
    before = folder.output.read_bytes()
    tally = await folder.run()
    assert folder.output.read_bytes() == before
    assert folder.asked == []
    assert (tally.good, tally.errors, tally.earlier) == (1, 3, 4)
    folder.write_input(*lines, request_line("c"))
    await folder.run()
    assert folder.asked == ["about c"]
    assert folder.output.read_bytes().startswith(before)
    assert len(folder.results) == 5


async def test_errors_are_asked_for_again_if_that_is_wanted(folder: BatchFolder) -> None:
    folder.write_input(request_line("a"), "nope", request_line("b", body={"prompt": "x", "model": "other"}))
    await folder.run()
    folder.write_input(request_line("a"), request_line("c"), request_line("b"))
    os.chmod(folder.output, 0o640)
    tally = await folder.run(retry_errors=True)
    assert sorted(folder.asked) == ["about b", "about c"]
    assert (tally.good, tally.errors, tally.earlier) == (3, 0, 1)
    assert {name: result["response"]["status_code"] for name, result in folder.by_id.items()} == {
        "a": 200, "b": 200, "c": 200,
    }  # fmt: skip
    assert folder.output.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in folder.path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("left", [0, 1, 20, -1])
async def test_a_torn_last_line_is_repaired(folder: BatchFolder, left: int) -> None:
    """-1: only the end of line is missing, and the result counts."""
    folder.write_input(request_line("a"), request_line("b"))
    await folder.run(concurrency=1)
    first, second = folder.output.read_bytes().splitlines(keepends=True)
    folder.output.write_bytes(first + second[:left])
    await folder.run()
    assert folder.asked == ([] if left == -1 else ["about b"])
    assert folder.by_id.keys() == {"a", "b"}
    assert folder.output.read_bytes().startswith(first)


@pytest.mark.parametrize("retry_errors", [False, True])
async def test_a_file_that_is_something_else_is_left_alone(folder: BatchFolder, retry_errors: bool) -> None:
    folder.write_input(request_line("a"))
    folder.output.write_bytes(folder.input.read_bytes() + b"half")
    before = folder.output.read_bytes()
    with pytest.raises(BatchFileError, match=r"its line 1 is no result of a batch"):
        await folder.run(retry_errors=retry_errors)
    assert folder.output.read_bytes() == before
    assert len([*folder.path.iterdir()]) == 2


async def test_two_runs_never_write_to_one_file(folder: BatchFolder) -> None:
    folder.write_input(request_line("a"))
    with folder.output.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BatchFileError, match="is being written by another run"):
            await folder.run()


async def test_files_that_cannot_be_had(folder: BatchFolder) -> None:
    with pytest.raises(BatchFileError, match=r"cannot read .*in\.jsonl: No such file or directory"):
        await folder.run()
    folder.write_input(request_line("a"))
    folder.output.mkdir()
    with pytest.raises(BatchFileError, match=r"cannot write .*out\.jsonl: Is a directory"):
        await folder.run()


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_no_more_lines_are_under_way_than_allowed(folder: BatchFolder, concurrency: int) -> None:
    folder.write_input(*(request_line(str(number)) for number in range(10)))
    folder.llm.outputs_left = 0  # no answer comes
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: folder.run(concurrency=concurrency))
        await until(lambda: len(folder.llm.calls) >= concurrency)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert len(folder.llm.calls) == concurrency
        nursery.cancel_scope.cancel()
    assert not folder.llm.running


async def test_cancelled_at_any_answer_it_goes_on_from_there(folder: BatchFolder) -> None:
    names = [str(number) for number in range(8)]
    folder.write_input(*map(request_line, names))
    for answers in range(1, 4):  # so many of each run
        done = folder.num_results
        folder.llm.outputs_left = answers
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: folder.run(concurrency=2))
            await until(partial(folder.has_results, done + answers))
            nursery.cancel_scope.cancel()
        assert len(folder.results) == done + answers  # whole lines
        assert not folder.llm.running
    folder.llm.outputs_left = None
    tally = await folder.run()
    assert sorted(folder.by_id) == names
    assert (tally.good, tally.earlier) == (8, 6)


async def test_a_finished_answer_is_written_also_by_a_task_that_is_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "out"
    result = Result.refused(WrongLineError(1, "code", "it is wrong."))
    async with open_output(str(path), retry_errors=False) as output:
        with trio.CancelScope() as scope:
            scope.cancel()
            await output.write(result)
    assert WrongLine(**json.loads(path.read_text())["error"]) == result.error


async def test_room_is_waited_for(folder: BatchFolder, autojump_clock: trio.testing.MockClock) -> None:
    """An engine that restarts says when it will be back."""
    restarting = EngineRestartingError("It restarts.", retry_after=30)
    folder.llm = RefusingLLM([restarting, restarting])
    folder.write_input(request_line("a"))
    started = trio.current_time()
    await folder.run()
    assert folder.by_id["a"]["response"]["status_code"] == 200
    assert trio.current_time() - started >= 60


async def test_room_is_not_waited_for_without_end(
    folder: BatchFolder, autojump_clock: trio.testing.MockClock
) -> None:
    folder.write_input(request_line("a"))
    folder.llm.no_room = EngineRestartingError("It restarts.", retry_after=30)
    tally = await folder.run()
    assert tally.errors == 1
    assert folder.by_id["a"]["response"]["status_code"] == 503


async def test_a_dead_engine_ends_the_run_and_is_no_answer(folder: BatchFolder) -> None:
    folder.write_input(*(request_line(str(number)) for number in range(9)))
    with pytest.raises(EngineDeadError, match="the output has what was finished before"):
        await folder.run(concurrency=1, has_died=lambda: len(folder.llm.calls) >= 2)
    assert len(folder.results) == 1
    await folder.run()
    assert len(folder.by_id) == 9


async def test_an_engine_that_fails_at_one_line(folder: BatchFolder) -> None:
    folder.llm.script = lambda call, _: Answer(
        error=ZeroDivisionError("a bug") if call.text == "about b" else None
    )
    folder.write_input(*map(request_line, "abc"))
    tally = await folder.run()
    assert (tally.good, tally.errors) == (2, 1)
    assert folder.by_id["b"]["response"]["status_code"] == 500
    assert "bug" not in folder.output.read_text()
