"""Text from any server with the OpenAI API."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import httpx2

from trioserve.errors import TrioserveError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

__all__ = ["RemoteError", "RemoteSource"]

_CONNECT_TIMEOUT = 10.0  # seconds; an answer itself may take as long as it likes


class RemoteError(TrioserveError):
    """The server cannot be reached, refuses, or breaks off; the text is what it said."""


class RemoteSource(AbstractContextManager["RemoteSource"]):
    """A `TextSource`; owns the connections from entering to leaving."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        self._url = url
        self._model = model
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def __enter__(self) -> Self:
        """Connect, and ask for the model's name if none was given.

        Raises:
          RemoteError: the server cannot be reached, or has no model.
        """
        with self._remote_errors():
            self._client = httpx2.Client(
                base_url=self._url,
                headers=self._headers,
                timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT),
            )
        try:
            self._model = self._model or self._first_model()
        except BaseException:
            self._client.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Generator[str, None, None]:
        return self._stream("chat/completions", {"messages": list(messages)}, _text_of_delta)

    def complete(self, prompt: str, max_tokens: int | None) -> Generator[str, None, None]:
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        return self._stream("completions", {"prompt": prompt, **limit}, _text_of_completion)

    @contextmanager
    def _remote_errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise RemoteError(f"{self._url}: {str(error) or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RemoteError(f"{self._url}: what came is not of the OpenAI API: {error!r}") from error

    def _first_model(self) -> str:
        with self._remote_errors():
            response = self._client.get("models")
            _raise_for_status(response)
            models = response.json()["data"]
            if not models:
                raise RemoteError("the server has no model")
            return str(models[0]["id"])

    def _stream(
        self, path: str, body: dict[str, Any], text_of: Callable[[Any], str]
    ) -> Generator[str, None, None]:
        body = {"model": self._model, "stream": True, **body}
        has_ended = False
        with self._remote_errors(), self._client.stream("POST", path, json=body) as response:
            _raise_for_status(response)
            for event in httpx2.EventSource(response):
                if event.data == "[DONE]":
                    return
                for choice in _choices(json.loads(event.data)):
                    has_ended = has_ended or choice.get("finish_reason") is not None
                    yield text_of(choice)
        if not has_ended:
            raise RemoteError("the server broke off the answer")


def _text_of_delta(choice: Any) -> str:
    return (choice.get("delta") or {}).get("content") or ""


def _text_of_completion(choice: Any) -> str:
    return choice.get("text") or ""


def _choices(event: Any) -> list[Any]:
    if "error" in event:
        raise RemoteError(_message_of(event))
    return [choice for choice in event["choices"] if choice.get("index", 0) == 0]


def _raise_for_status(response: httpx2.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        reason = _message_of(response.json())
    except ValueError:
        reason = response.text.strip() or response.reason_phrase
    raise RemoteError(f"the server answered {response.status_code}: {reason}")


def _message_of(body: Any) -> str:
    """OpenAI's `{"error": {"message": ...}}`, and the shorter forms that are about."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)
