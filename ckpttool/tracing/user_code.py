"""Run the user's code: keep its output, exits and working directory from ours, and say what it
raises and where.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypeVar

import torch

from ckpttool.core.errors import CkptError

T = TypeVar("T")
# Folders end with a separator: site-packages/torchvision is not torch.
_NOT_OF_USER = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}")
_STANDARD = f"{Path(os.__file__).parent}{os.sep}"
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_META_SIGNS = (
    "meta tensor", "meta device", "meta kernel", "Meta tensor", "device meta", "device='meta'",
    "'meta'", "data is not allocated yet", "_local_scalar_dense", "register_meta function",
)  # fmt: skip


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
    loggers = logging.root.manager.loggerDict  # nothing is ever removed from it
    handlers: list[logging.Handler] = []
    for name in _loggers_of_torch(len(loggers)):
        for handler in getattr(loggers[name], "handlers", ()):
            if _log_as_warning not in handler.filters:
                handlers.append(handler)
    for handler in handlers:
        handler.addFilter(_log_as_warning)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_log_as_warning)


@lru_cache(1)
def _loggers_of_torch(count: int) -> list[str]:
    """Return the names of torch's loggers; `count` is the number of all loggers, which grows with
    each new one.
    """
    return [
        name for name in list(logging.root.manager.loggerDict) if f"{name}.".startswith("torch.")
    ]


def _log_as_warning(record: logging.LogRecord) -> bool:
    if record.levelno < logging.WARNING:
        return True
    warnings.showwarning(
        UserWarning(record.getMessage()), UserWarning, record.pathname, record.lineno
    )
    return False


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers of the block, and restore the caller's generators."""
    if torch.cuda.is_initialized():
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            yield
    else:
        # `torch.manual_seed` would note this seed, with a traceback, for the GPUs that the caller
        # uses later
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield


@contextlib.contextmanager
def _writes_to_stderr() -> Iterator[None]:
    """Send to stderr what child processes and libraries in C write to stdout in the block."""
    try:
        stdout = os.dup(1)
    except OSError:  # it is closed
        yield
        return
    flush = ctypes.CDLL(None).fflush
    flush(None)  # of all files
    try:
        with contextlib.suppress(OSError):  # stderr is closed
            os.dup2(2, 1)
        yield
    finally:
        flush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


@contextlib.contextmanager
def _exit_raises() -> Iterator[None]:
    """Let `os._exit` raise SystemExit: the process would end with the status of a complete
    comparison.
    """
    process, end = os.getpid(), os._exit

    def ended(status: int) -> NoReturn:
        if os.getpid() != process:
            end(status)
        raise SystemExit(status)

    os._exit = ended
    try:
        yield
    finally:
        os._exit = end


# our working directory -> the one in which an import of the user's code ended
_FOLDERS: dict[str, str] = {}


@contextlib.contextmanager
def _in_its_folder(imports: bool) -> Iterator[None]:
    """Run the user's code in the working directory that its import chose, and come back to ours.

    If that directory is deleted by now, the code runs in ours.
    """
    try:
        ours = os.getcwd()
    except OSError:  # it is deleted
        yield
        return
    with contextlib.suppress(FileNotFoundError):
        os.chdir(_FOLDERS.get(ours, ours))
    try:
        yield
    finally:
        if imports:
            with contextlib.suppress(FileNotFoundError):
                _FOLDERS[ours] = os.getcwd()
        os.chdir(ours)


_CONTAINED = threading.Lock()


@contextlib.contextmanager
def _contained(imports: bool) -> Iterator[None]:
    """Keep stdout, the process and its working directory from the user's code.

    They belong to the whole process, so one thread at a time does this, and a model that builds a
    model does it once.
    """
    if not _CONTAINED.acquire(blocking=False):
        yield
        return
    try:
        with _writes_to_stderr(), _exit_raises(), _in_its_folder(imports):
            yield
    finally:
        _CONTAINED.release()


@contextlib.contextmanager
def user_code(
    what: str, on_meta: bool = False, error: type[CkptError] = CkptError, imports: bool = False
) -> Iterator[None]:
    """Run the user's code: its output goes to stderr, and whatever it raises becomes an `error`
    that says where.

    It may change its working directory, not ours. Later blocks start where the last one that
    `imports` ended.
    """
    try:
        with _contained(imports), prints_once():
            yield
    except CkptError:
        raise
    except (Exception, SystemExit) as raised:
        hint = _fix_of(raised, on_meta, imports)
        raise error(f"{what}: {describe(raised)}", hint=hint) from raised


def _fix_of(raised: Exception | SystemExit, on_meta: bool, imports: bool) -> str:
    """Return the hint for an error of the user's code."""
    if on_meta and failed_on_meta(raised):
        return (
            "this constructor needs real tensors, and it ran on the meta device: "
            "add --materialize to build it for real"
        )
    root = _root_cause(raised)
    if isinstance(root, ModuleNotFoundError) and root.name:
        return (
            f"the model's code needs {root.name}: run ckpttool in the environment that the"
            " model runs in"
        )
    if isinstance(raised, SystemExit) and imports:
        return (
            "the module exits when it is imported: put the script's part under `if __name__ =="
            " '__main__':`"
        )
    if isinstance(raised, SystemExit):
        return "name a function that only builds, and does not parse a command line or exit"
    if on_meta:
        return (
            "fix it there; if it only fails on the meta device, add --materialize to build"
            " it for real"
        )
    return "fix it there: the same happens in plain Python"


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
    """Return one line: the error's class and text, the file and line in the user's code, and the
    first cause.
    """
    place = raised_at(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename is not None:  # not raised by the user
        place = f"{short_path(error.filename)}:{error.lineno}"
    text = f"{_summary(error)} ({place})" if place else _summary(error)
    root = _root_cause(error)
    return text if root is error else f"{text}, caused by {_summary(root)}"


def _root_cause(error: BaseException) -> BaseException:
    """Follow ``raise ... from`` back to the first error."""
    seen = {id(error)}
    while error.__cause__ is not None and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
    return error


def _summary(error: BaseException) -> str:
    name = type(error).__name__
    for line in str(error).splitlines():
        if line.strip():
            return f"{name}: {textwrap.shorten(line.strip(), 240)}"
    return name


def raised_at(trace: TracebackType | None) -> str | None:
    """Return ``file:line`` of the last frame of the user's code, or else of an installed
    package.
    """
    last = last_of_user = None
    for frame in traceback.extract_tb(trace):
        name = frame.filename
        if name.startswith(("<", *_NOT_OF_USER)):
            continue
        last = frame
        if not name.startswith(_STANDARD) and _INSTALLED.isdisjoint(Path(name).parts):
            last_of_user = frame
    last = last_of_user or last
    return None if last is None else f"{short_path(last.filename)}:{last.lineno}"


def short_path(filename: str) -> str:
    """Return the path, relative if it is below the working directory."""
    with contextlib.suppress(ValueError, OSError):
        return str(Path(filename).relative_to(Path.cwd()))
    return filename


def failed_on_meta(error: BaseException) -> bool:
    """Return whether the error, or one of its causes, says that a tensor has no values."""
    kinds = (RuntimeError, NotImplementedError, TypeError, ValueError)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, kinds) and says_meta(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def says_meta(text: str) -> bool:
    return any(sign in text for sign in _META_SIGNS)
