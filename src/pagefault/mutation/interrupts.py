"""Ctrl-C as something to look at: an exception gets lost where Python runs its hooks of a fork."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Notes an interrupt while it is entered.

    Attributes:
        asked: Whether somebody has asked for the end.
    """

    def __init__(self) -> None:
        self.asked = False
        self._handler: Any = None

    def __enter__(self) -> Interrupts:
        self._handler = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
