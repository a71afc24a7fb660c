"""Ctrl-C and SIGTERM: the first asks a run to stop at the next safe point, the second stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class StopRequest:
    """Whether, and by which signal, the user asked to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def requested(self) -> bool:
        """True once a signal came."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The shell's exit code for the signal: 130 for Ctrl-C, 143 for SIGTERM; 0 when none came."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def stop_on_signal(told: Callable[[], None]) -> Iterator[StopRequest]:
    """Yield a request that the first SIGINT or SIGTERM sets, calling ``told``; a second raises
    KeyboardInterrupt.

    Outside the main thread, where Python allows no handlers, signals keep their usual effect.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if request.requested:
            raise KeyboardInterrupt
        request.signal = number
        # The signal may come in the middle of a write to the same stream, which then refuses a second one.
        with suppress(RuntimeError):
            told()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
