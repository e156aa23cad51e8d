"""Runs of a batch over a scripted engine, without a process and a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

from helpers_api import FakeLLM
from trioserve.batch.application import open_application
from trioserve.batch.line_reader import LineReader
from trioserve.batch.output import open_input, open_output
from trioserve.batch.run import Batch, Tally
from trioserve.server.app import create_app
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import Callable

COMPLETIONS = "/v1/completions"


def request_line(custom_id: Any, *, url: str = COMPLETIONS, body: Any = None, **fields: Any) -> str:
    body = {"prompt": f"about {custom_id}", "model": "small"} if body is None else body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **fields})


@attrs.define
class Progress:
    done: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def count(self, number: int, num_input_tokens: int, num_output_tokens: int) -> None:
        self.done += number
        self.input_tokens += num_input_tokens
        self.output_tokens += num_output_tokens


@attrs.define(eq=False)
class BatchFolder:
    """An input and an output, and a scripted engine."""

    path: Path
    llm: FakeLLM = attrs.field(factory=FakeLLM)
    progress: Progress = attrs.field(factory=Progress)

    @property
    def input(self) -> Path:
        return self.path / "in.jsonl"

    @property
    def output(self) -> Path:
        return self.path / "out.jsonl"

    def write_input(self, *lines: str) -> None:
        self.input.write_text("".join(f"{line}\n" for line in lines))

    @property
    def results(self) -> list[Any]:
        text = self.output.read_text()
        assert not text or text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    @property
    def num_results(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def has_results(self, number: int) -> bool:
        return self.num_results == number

    @property
    def by_id(self) -> dict[str, Any]:
        results = {result["custom_id"]: result for result in self.results}
        assert len(results) == len(self.results)
        return results

    @property
    def asked(self) -> list[str]:
        """The prompts that reached the engine."""
        return [str(call.text) for call in self.llm.calls]

    async def run(
        self,
        *,
        concurrency: int = 4,
        retry_errors: bool = False,
        max_line: int = 2**20,
        has_died: Callable[[], bool] = lambda: False,
    ) -> Tally:
        self.llm.calls.clear()
        self.progress = Progress()
        app = create_app(self.llm, ServerArgs(responses_store="none"))  # type: ignore[arg-type]  # a fake
        with open_input(str(self.input)) as source:
            async with (
                open_output(str(self.output), retry_errors=retry_errors) as output,
                open_application(app) as application,
            ):
                batch = Batch(
                    lines=LineReader(source, max_line),
                    application=application,
                    output=output,
                    concurrency=concurrency,
                    progress=self.progress,
                    has_died=has_died,
                )
                await batch.run()
        return batch.tally


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what files and threads bring about."""
    with trio.fail_after(30):
        while not condition():  # noqa: ASYNC110 - there is no event of it
            await trio.sleep(0.01)
