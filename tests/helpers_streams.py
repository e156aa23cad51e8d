"""A stream of a server that is read in a thread, while the test does something to that server."""

from __future__ import annotations

import threading

import openai

from served import MODEL, wait_for

__all__ = ["StreamInThread"]


class StreamInThread:
    """A streaming completion, read to its end in a thread. The constructor waits for its first chunk."""

    def __init__(self, url: str, *, max_tokens: int = 4000, model: str = MODEL) -> None:
        self.chunks = 0
        self.error: Exception | None = None
        self.finished = False
        self._max_tokens = max_tokens
        self._model = model
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_for(lambda: self.chunks or self.error)

    def _read(self) -> None:
        try:
            with self._client.completions.create(
                model=self._model,
                prompt="x",
                max_tokens=self._max_tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            ) as stream:
                for _ in stream:
                    self.chunks += 1
            self.finished = True
        except Exception as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._client.close()
