"""Every answer of an application, in this process and in children, is checked while a test runs.

`conftest.py` switches it on for the whole suite: no test has to ask for it. What is wrong is collected, and
fails the test at whose end it is found; an answer of a server that lives on may be found at the next one's.

Only what an application sends is seen. Refusals of the layers below it (a head that is too large, a
connection too many) have tests of their own.
"""

from __future__ import annotations

import functools
import os
import re
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from werkzeug.exceptions import HTTPException

from answer_checks import NOWHERE, NOWHERE_OF_ANTHROPIC, Answer, Operation, WrongAnswerError, operations
from trioserve.server.error_envelopes import is_anthropic
from trioserve.server.request_scope import App

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "CHILDREN",
    "FOLDER_VARIABLE",
    "WrongAnswers",
    "check_all_answers",
    "check_this_process",
    "checking_all_answers",
    "operation_of",
    "template_of",
]

FOLDER_VARIABLE = "TESTS_WRONG_ANSWERS"
"""An environment variable: the folder in which this process and its children write down what is wrong."""

CHILDREN = Path(__file__).parent / "checked_children"
"""On the PYTHONPATH of a child, it has the child check what it answers."""


@attrs.frozen
class WrongAnswers:
    """What is wrong with answers, as files of a folder: children have them in common with this process."""

    folder: Path

    def add(self, text: str) -> None:
        (self.folder / uuid.uuid4().hex).write_text(text)

    def take(self) -> list[str]:
        """All that is known; it is forgotten."""
        texts = []
        for path in self.folder.iterdir():
            texts.append(path.read_text())
            path.unlink()
        return texts


def template_of(rule: str) -> str:
    """A path of Quart's as OpenAPI writes it."""
    return re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule)


def operation_of(app: App, method: str, path: str) -> Operation | None:
    """None: it is not described, as a test's own route."""
    try:
        rule, _ = app.url_map.bind("").match(path, method, return_rule=True)
    except HTTPException:
        return NOWHERE_OF_ANTHROPIC if is_anthropic(path) else NOWHERE
    return operations().get((method.lower(), template_of(rule.rule)))


@attrs.define
class _Watch:
    """Sees what an application sends for one request."""

    app: App
    scope: Any
    wrong: WrongAnswers
    answer: Answer | None = None

    def see(self, message: Any) -> None:
        try:
            self._see(message)
        except WrongAnswerError as error:
            self.wrong.add(str(error))
            self.answer = None  # one error is enough
        except Exception as error:
            self.wrong.add(f"{self.scope['method']} {self.scope['path']}: {error!r} at {message}")
            self.answer = None

    def _see(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.answer = self._begin(message)
        elif self.answer is not None:
            self.answer.take(message.get("body", b""))
            if not message.get("more_body", False):
                self.answer.end()

    def _begin(self, start: Any) -> Answer | None:
        method = self.scope["method"]
        path = self.scope["path"].removeprefix(self.scope.get("root_path", ""))
        operation = operation_of(self.app, method, path)
        if operation is None:
            return None
        headers = dict(start["headers"])
        media_type = headers.get(b"content-type", b"").decode().partition(";")[0]
        return Answer(operation, start["status"], media_type)


def check_all_answers(wrong: WrongAnswers) -> None:
    """From now on, what applications of `create_app` send in this process is looked at."""
    App.__call__ = _checked(App.__call__, wrong)  # type: ignore[method-assign]


@contextmanager
def checking_all_answers(wrong: WrongAnswers) -> Iterator[None]:
    """The same, for a while."""
    call = App.__call__
    check_all_answers(wrong)
    try:
        yield
    finally:
        App.__call__ = call  # type: ignore[method-assign]


def _checked(call: Any, wrong: WrongAnswers) -> Any:
    @functools.wraps(call)
    async def checked(app: App, scope: Any, receive: Any, send: Any) -> None:
        is_ours = app.name == "trioserve" and scope["type"] == "http"
        if not is_ours or scope["method"] in {"HEAD", "OPTIONS"}:
            await call(app, scope, receive, send)
            return
        watch = _Watch(app, scope, wrong)

        async def seen(message: Any) -> None:
            watch.see(message)
            await send(message)

        await call(app, scope, receive, seen)

    return checked


def check_this_process() -> None:
    """What a child of the tests does: see `checked_children`."""
    check_all_answers(WrongAnswers(Path(os.environ[FOLDER_VARIABLE])))
