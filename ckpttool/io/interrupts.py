"""Signals that end a program are put off where what was begun must come to its end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """The program was asked to end by the signal `number`; like Ctrl-C it passes what catches errors."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def uninterrupted(*, insisting: bool = False) -> Iterator[None]:
    """Puts off `ENDING` signals until the block has ended; they then do what they do outside of it.

    For short blocks of local calls: a switch, a clean-up; and with `insisting`, where a second signal is not put off,
    for calls that may wait for a network. Signals reach the main thread only; elsewhere, and where Python handles none
    of them, there is nothing to put off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        handler = handlers[number]
        if came and insisting and callable(handler):
            handler(number, frame)
        came.append(number)

    handlers = {number: signal.getsignal(number) for number in ENDING}
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `Terminated` inside, so that what was begun is cleaned up; a second one ends at once.

    A signal that is ignored, as by nohup, stays so; outside of the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Terminated(number)

    before = {number: signal.getsignal(number) for number in ENDING if number != signal.SIGINT}
    before = {number: handler for number, handler in before.items() if handler == signal.SIG_DFL}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
