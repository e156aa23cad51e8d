"""An engine core that draws its tokens from a list, at a pace that no model keeps.

`python benchmarks/paced_engine.py serve ...` is `trioserve serve` over such a core, which runs in a process
of its own and speaks the real link. A step takes `PACED_STEP_MS` milliseconds and gives every sequence one
token, whose text is a short word; a sequence ends at its `max_tokens`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from array import array
from functools import partial
from pathlib import Path

import attrs
import trio

import trioserve.link.process
from trioserve.cli.main import main as run_cli
from trioserve.core.stats import CoreStats
from trioserve.frontend.tokenizer import Tokenizer
from trioserve.link.client import config_hash
from trioserve.link.message_stream import MessageStream
from trioserve.link.messages import (
    PROTOCOL_VERSION,
    Abort,
    Add,
    Hello,
    Ready,
    StepOutputs,
    Utility,
    UtilityResult,
)
from trioserve.link.parent_watch import dies_with_parent
from trioserve.outputs import FinishReason
from trioserve.version import __version__

_NUM_BLOCKS = 1 << 16
_BLOCK_SIZE = 16


@attrs.define
class _Sequence:
    num_left: int
    num_drawn: int = 0


@attrs.define(eq=False)
class _PacedCore:
    _stream: MessageStream
    _words: list[int]
    _step_seconds: float
    _sequences: dict[int, _Sequence] = attrs.field(factory=dict)
    _num_received: int = 0

    async def read(self) -> None:
        """Until the link ends."""
        while (message := await self._stream.receive()) is not None:
            match message:
                case Add():
                    self._num_received += 1
                    self._sequences[message.request_id] = _Sequence(message.params.max_tokens or 16)
                case Abort():
                    for sequence_id in message.request_ids:
                        self._sequences.pop(sequence_id, None)
                    self._report(freed=message.request_ids)
                case Utility():
                    self._stream.send_nowait(UtilityResult(call_id=message.call_id))

    async def run(self) -> None:
        next_step = trio.current_time()
        while True:
            next_step = max(next_step + self._step_seconds, trio.current_time())
            await trio.sleep_until(next_step)
            if self._sequences:
                self._step()

    def _step(self) -> None:
        ids, tokens = list(self._sequences), []
        for sequence in self._sequences.values():
            tokens.append(self._words[sequence.num_drawn % len(self._words)])
            sequence.num_drawn += 1
            sequence.num_left -= 1
        reasons = [FinishReason.LENGTH if self._sequences[i].num_left <= 0 else 0 for i in ids]
        self._report(ids, tokens, reasons)
        for sequence_id, reason in zip(ids, reasons, strict=True):
            if reason:
                del self._sequences[sequence_id]

    def _report(
        self,
        ids: list[int] | None = None,
        tokens: list[int] | None = None,
        reasons: list[int] | None = None,
        freed: list[int] | None = None,
    ) -> None:
        count = len(ids or ())
        message = StepOutputs(
            request_ids=array("q", ids or ()).tobytes(),
            num_tokens=array("i", [1] * count).tobytes(),
            token_ids=array("i", tokens or ()).tobytes(),
            finish_reasons=bytes(reasons or ()),
            stop_token_ids=array("i", [-1] * count).tobytes(),
            num_cached_tokens=array("i", [0] * count).tobytes(),
            logprobs=None,
            num_prompt_logprobs=b"",
            prompt_logprobs=None,
            stats=self._stats(count),
            freed=array("q", freed or ()).tobytes(),
        )
        self._stream.send_nowait(message)

    def _stats(self, num_tokens: int) -> CoreStats:
        return CoreStats(
            num_running=len(self._sequences),
            num_waiting=0,
            kv_cache_usage=0.0,
            num_preemptions=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            num_prompt_tokens=0,
            num_generation_tokens=num_tokens,
            num_received=self._num_received,
        )


def _words(tokenizer_directory: str) -> list[int]:
    """Tokens that are a space and a few letters: each completes its text by itself."""
    tokenizer = Tokenizer.from_directory(tokenizer_directory)
    texts = ((token_id, tokenizer.token_text(token_id)) for token_id in range(1000, 6000))
    return [i for i, text in texts if text[0] == " " and text[1:].isascii() and text[1:].isalpha()]


async def _serve_core(link: socket.socket) -> None:
    stream = MessageStream(trio.SocketStream(trio.socket.from_stdlib_socket(link)))
    hello = await stream.receive()
    assert isinstance(hello, Hello)
    step_seconds = float(os.environ["PACED_STEP_MS"]) / 1e3
    core = _PacedCore(stream, _words(hello.model.tokenizer_directory), step_seconds)
    stream.send_nowait(_ready(hello))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run_writer)
        nursery.start_soon(core.run)
        await core.read()
        nursery.cancel_scope.cancel()
    stream.close()


def _ready(hello: Hello) -> Ready:
    return Ready(
        protocol=PROTOCOL_VERSION,
        version=__version__,
        config_hash=config_hash(hello.config, hello.model),
        num_blocks=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
        kv_cache_bytes=0,
        load_seconds=0.0,
        kernels="none",
    )


def main() -> int:
    """The server if there are words on the command line, the core if there is a number."""
    if not sys.argv[1].isdecimal():
        process = trioserve.link.process
        process.EngineProcess = partial(process.EngineProcess, Path(__file__).stem)  # type: ignore[misc, assignment]
        return run_cli()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = socket.socket(fileno=int(sys.argv[1]))
    link.setblocking(False)
    with dies_with_parent(link.fileno()):
        trio.run(_serve_core, link)
    return 0


if __name__ == "__main__":
    sys.exit(main())
