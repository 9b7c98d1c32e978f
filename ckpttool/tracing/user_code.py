"""Run the user's code: its prints go to stderr, and its errors become one clear error."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from ckpttool.core.errors import CkptError

T = TypeVar("T")
_META_SIGNS = (
    "meta tensor",
    "meta device",
    "meta kernel",
    "Meta tensor",
    "device meta",
    "device='meta'",
    "'meta'",
    "data is not allocated yet",
    "_local_scalar_dense",
)


class _Once(io.TextIOBase):
    """Writes each line to stderr once: a model is built several times, and has many layers."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line not in self._seen:
                self._seen.add(line)
                sys.stderr.write(f"{line}\n")
        return len(text)

    def finish(self) -> None:
        """Write the last line, if it does not end with a newline."""
        if self._begun:
            self.write("\n")


_PRINTED = _Once()


@contextlib.contextmanager
def prints_once() -> Iterator[None]:
    """Send what the block prints to stderr, each line once, and what torch logs to `warnings`."""
    with contextlib.redirect_stdout(_PRINTED), logs_as_warnings():
        try:
            yield
        finally:
            _PRINTED.finish()


@contextlib.contextmanager
def logs_as_warnings() -> Iterator[None]:
    """Hand the warnings that torch logs to `warnings.showwarning`, whatever the filters are."""
    names = [name for name in logging.root.manager.loggerDict if f"{name}.".startswith("torch.")]
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    handlers = [handler for handler in handlers if _log_as_warning not in handler.filters]
    for handler in handlers:
        handler.addFilter(_log_as_warning)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_log_as_warning)


def _log_as_warning(record: logging.LogRecord) -> bool:
    if record.levelno < logging.WARNING:
        return True
    warnings.showwarning(UserWarning(record.getMessage()), UserWarning, record.pathname, record.lineno)
    return False


@contextlib.contextmanager
def user_code(what: str, on_meta: bool = False, error: type[CkptError] = CkptError) -> Iterator[None]:
    """Run the user's code: its prints go to stderr, and whatever it raises becomes an `error` that says where."""
    try:
        with prints_once():
            yield
    except CkptError:
        raise
    except (Exception, SystemExit) as raised:
        if on_meta and failed_on_meta(raised):
            hint = (
                "this constructor needs real tensors, and it ran on the meta device: "
                "add --materialize to build it for real"
            )
        elif isinstance(raised, ModuleNotFoundError):
            hint = f"the model's code needs {raised.name}: run ckpttool in the environment that the model runs in"
        elif isinstance(raised, SystemExit):
            hint = "the module exits when it is imported: put the script's part under `if __name__ == '__main__':`"
        elif on_meta:
            hint = "fix it there; if it only fails on the meta device, add --materialize to build it for real"
        else:
            hint = "fix it there: the same happens in plain Python"
        raise error(f"{what}: {describe(raised)}", hint=hint) from raised


def attempt(run: Callable[[], T]) -> T | Exception:
    """Return what the model's own code returns or raises, without its prints and warnings."""
    try:
        with prints_once(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()
    except (Exception, SystemExit) as error:
        return as_exception(error)


def as_exception(error: Exception | SystemExit) -> Exception:
    """Return the error; an exit of the process becomes an error too."""
    return error if isinstance(error, Exception) else RuntimeError(f"exits: {error}")


def describe(error: BaseException) -> str:
    """Return one line: the error's class, its text, and the file and line in the user's code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {textwrap.shorten(lines[0], 240)}" if lines else type(error).__name__
    place = raised_at(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename is not None:  # else the user's code raised it
        place = f"{short_path(error.filename)}:{error.lineno}"
    return f"{text} ({place})" if place else text


def raised_at(trace: TracebackType | None) -> str | None:
    """Return ``file:line`` of the last frame of the user's code, or else of an installed package."""
    ckpttool, installed_torch = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    standard = str(Path(os.__file__).parent)
    frames = [f for f in traceback.extract_tb(trace) if not f.filename.startswith(("<", ckpttool, installed_torch))]
    users = [f for f in frames if not f.filename.startswith(standard) and "site-packages" not in f.filename]
    last = (users or frames)[-1:]
    return f"{short_path(last[0].filename)}:{last[0].lineno}" if last else None


def short_path(filename: str) -> str:
    """Return the path, relative if it is below the working directory."""
    with contextlib.suppress(ValueError, OSError):
        return str(Path(filename).relative_to(Path.cwd()))
    return filename


def failed_on_meta(error: BaseException) -> bool:
    """Return whether the error, or one of its causes, says that a tensor has no values."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (RuntimeError, NotImplementedError, TypeError, ValueError)) and says_meta(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def says_meta(text: str) -> bool:
    """Return whether an error's text is about the meta device."""
    return any(sign in text for sign in _META_SIGNS)
