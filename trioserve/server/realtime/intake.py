"""From what a client sends of audio to windows that can be heard, and to what it is told meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve.audio.live import LiveWindows, Pcm16Decoder
from trioserve.audio.turns import TurnDetector, TurnEnd, TurnStart
from trioserve.audio_input import SAMPLING_RATE
from trioserve.server.realtime.dialects import OpenAIDialect, VllmDialect
from trioserve.server.realtime.item import Item
from trioserve.server.realtime.settings import SessionSettings

if TYPE_CHECKING:
    from trioserve.server.protocol.realtime import AudioAppend, TurnDetection

__all__ = ["Commit", "Intake", "Window"]


@attrs.frozen
class Window:
    """To be heard."""

    item: Item
    samples: NDArray[np.float32]
    settings: SessionSettings


@attrs.frozen
class Commit:
    """All of an item was heard."""

    item: Item


class Intake:
    """Nothing here waits, or is a checkpoint: what comes of the audio lies in `untold` and `unheard`, for the
    session to take away."""

    def __init__(self, settings: SessionSettings) -> None:
        self.settings = settings
        self.dialect: VllmDialect | OpenAIDialect = OpenAIDialect() if settings.is_openai else VllmDialect()
        self.item = Item()
        """What is being said."""
        self.untold: list[object | None] = []
        """Events for the client; to be told first."""
        self.unheard: list[Window | Commit] = []
        self._previous: Item | None = None
        self._windows = LiveWindows()
        self._decoder = Pcm16Decoder(settings.rate)
        self._turns: TurnDetector | None = None

    def update(self, settings: SessionSettings) -> None:
        """What is said from now on is heard by these."""
        if settings.rate != self.settings.rate:
            self._take(self._decoder.finish())
            self._decoder = Pcm16Decoder(settings.rate)
        if settings.turn_detection != self.settings.turn_detection:
            self._turns = _make_detector(settings.turn_detection)
        if settings.is_openai:
            self.dialect = OpenAIDialect()
        self.settings = settings
        self.untold.append(self.dialect.updated(settings.state()))

    def append(self, event: AudioAppend) -> None:
        """Of megabytes it takes tens of milliseconds.

        Raises:
          EventError: it is no audio.
        """
        self._take(self._decoder.decode(event.samples()))

    def cut_rest(self) -> None:
        """All that was said so far can be heard now."""
        self._take(self._decoder.finish())
        if self._turns is not None:
            self._cut(self._turns.finish())
        self._finish_windows()

    def commit(self) -> None:
        """The item ends here."""
        self.cut_rest()
        self._end_item()

    def clear(self) -> None:
        """What was said of the item, and was not told yet, was not said."""
        self.item.is_over = True
        self.item = Item()
        self._windows.clear()
        self._decoder = Pcm16Decoder(self.settings.rate)
        self._turns = _make_detector(self.settings.turn_detection)
        self.untold.append(self.dialect.cleared())

    def _take(self, samples: NDArray[np.float32]) -> None:
        if self._turns is None:
            self._cut(samples)
            return
        for part in self._turns.push(samples):
            match part:
                case TurnStart(at):
                    self.untold.append(self.dialect.started(self.item, _milliseconds(at)))
                case TurnEnd(at):
                    self.untold.append(self.dialect.stopped(self.item, _milliseconds(at)))
                    self._finish_windows()
                    self._end_item()
                case _:
                    self._cut(part)

    def _cut(self, samples: NDArray[np.float32]) -> None:
        self.item.seconds += len(samples) / SAMPLING_RATE
        self.unheard += [Window(self.item, window, self.settings) for window in self._windows.push(samples)]

    def _finish_windows(self) -> None:
        self.unheard += [Window(self.item, window, self.settings) for window in self._windows.finish()]

    def _end_item(self) -> None:
        self.unheard.append(Commit(self.item))
        self.untold.append(self.dialect.committed(self.item, self._previous))
        self._previous, self.item = self.item, Item()


def _make_detector(settings: TurnDetection | None) -> TurnDetector | None:
    if settings is None:
        return None
    return TurnDetector(
        threshold=settings.threshold,
        padding=settings.prefix_padding_ms / 1000,
        silence=settings.silence_duration_ms / 1000,
    )


def _milliseconds(samples: int) -> int:
    return samples * 1000 // SAMPLING_RATE
