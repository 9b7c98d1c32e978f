"""Signals that end a program, postponed while something must be finished."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Terminated(KeyboardInterrupt):
    """The program was asked to end by the signal `number`; like Ctrl-C, ``except Exception`` does not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def uninterrupted(*, insisting: bool = False) -> Iterator[None]:
    """Postpone signals that end the program until the block has ended.

    For short blocks of local calls. With `insisting`, a second signal is not postponed: for calls that may wait for a
    network. Signals reach the main thread only; in other threads nothing is postponed.
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

    handlers = {number: signal.getsignal(number) for number in _ENDING}
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
    """Let SIGTERM and SIGHUP raise `Terminated` inside, so that everything is cleaned up; a second one ends at once.

    A signal that is ignored, as by nohup, stays ignored; outside of the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Terminated(number)

    handlers = [number for number in _ENDING if number != signal.SIGINT and signal.getsignal(number) == signal.SIG_DFL]
    for number in handlers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handlers:
            signal.signal(number, signal.SIG_DFL)
