"""Run the user's code, and build the model that a MODEL operand names, on the meta device or for
real.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import importlib
import importlib.util
import inspect
import io
import logging
import os
import re
import sys
import textwrap
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ckpttool.core.errors import CkptError
from ckpttool.core.text import a
from ckpttool.core.values import dataclass
from ckpttool.io import sources
from ckpttool.tracing.copy_module import copy_of
from ckpttool.tracing.memory import place_of, token

T = TypeVar("T")
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
    # `torch.manual_seed` would note this seed, with a traceback, for the GPUs that the caller uses
    # later
    else:
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
    written = ctypes.CDLL(None).fflush
    written(None)
    try:
        with contextlib.suppress(OSError):  # stderr is closed
            os.dup2(2, 1)
        yield
    finally:
        written(None)
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


# the working directory in which an import of the user's code ended, by ours
_FOLDERS: dict[str, str] = {}


@contextlib.contextmanager
def _in_its_folder(imports: bool) -> Iterator[None]:
    """Run the user's code in the working directory that its import chose, and come back to ours."""
    try:
        ours = os.getcwd()
    except OSError:  # it is deleted
        yield
        return
    _go_to(_FOLDERS.get(ours, ours))
    try:
        yield
    finally:
        if imports:
            _FOLDERS[ours] = os.getcwd()
        _go_to(ours)


def _go_to(folder: str) -> None:
    if os.getcwd() != folder:
        os.chdir(folder)


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
    # else the user's code raised it
    if isinstance(error, SyntaxError) and error.filename is not None:
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
    ckpttool, installed_torch = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    standard = str(Path(os.__file__).parent)
    last = last_of_user = None
    for frame in traceback.extract_tb(trace):
        name = frame.filename
        if name.startswith(("<", ckpttool, installed_torch)):
            continue
        last = frame
        if not name.startswith(standard) and "site-packages" not in name:
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


_FORM = "a model is package.module:attr or path/to/file.py:attr"
_ABSENT = object()
# By path and state of the file: a model and its optimizer come from one module, not from two with
# the same name.
_LOADED: dict[tuple[str, int, int], ModuleType] = {}


@dataclass(frozen=True)
class LoadedModel:
    """A model definition. `build()` returns a fresh instance each time, since some state_dict
    methods change the model.

    `operand` is what the user named; `make` calls the user's factory or copies the user's instance.
    """

    operand: str
    make: Callable[[bool], nn.Module] = field(repr=False)
    materialize: bool = False

    def build(self, materialize: bool | None = None, seed: int = 0) -> nn.Module:
        """Return a fresh instance, on meta or with real weights (`materialize`; default: as
        loaded).

        Raises `CannotBuild` with the user's own error if the constructor fails.
        """
        real = self.materialize if materialize is None else materialize
        what = f"{self.operand} cannot be built"
        with user_code(what, on_meta=not real, error=CannotBuild), seeded(seed):
            if real:
                instance = self.make(True)
            else:
                with _WithoutValues(), _StaysOnMeta():
                    instance = self.make(False)
        vars(self).setdefault("kind", type(instance))
        if not real and "nbytes" not in vars(self):
            vars(self)["nbytes"] = _nbytes(instance)
        return instance

    @cached_property
    def kind(self) -> type[nn.Module]:
        """The class of an instance. Raises as `build`."""
        return type(self.build())

    @cached_property
    def nbytes(self) -> int:
        """The bytes of an instance's parameters and buffers, shared ones once; 0 if it cannot be
        built on meta.
        """
        with contextlib.suppress(CannotBuild):
            return _nbytes(self.build(False))
        return 0


def _nbytes(model: nn.Module) -> int:
    sizes: dict[object, int] = {}  # by the place of the bytes
    with torch._C.DisableTorchFunction():  # this is not a question of the constructor
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and not torch.nn.parameter.is_lazy(tensor):
                    sizes[place_of(token(tensor))] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


class _WithoutValues(TorchDispatchMode):
    """Leave out random values on meta: torch would import its compiler to fill tensors that have no
    data.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `Recorder`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.normal_.default and args[0].is_meta:
            deviation = min(args[2:3], default=1.0)
            if deviation >= 0:
                return args[0]
        out = func(*args, **(kwargs or {}))
        if _DEVICES and args and _is_on_meta(args[0]) and _is_on_meta(out):
            _DEVICES[out.untyped_storage()] = device_for_real(args[0])
        return out


class _StaysOnMeta(TorchFunctionMode):
    """Keep tensors without values on meta if the constructor moves them, whether or not there is
    such a device.

    As for real, a move to the device that a tensor is on returns the same tensor, and a move to
    another one a copy.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.init.kaiming_uniform_ and _is_usual(**(kwargs or {})):
            return kwargs["tensor"]
        if func in _MOVES:
            with torch._C.DisableTorchFunction():  # this is not a question of the constructor
                moved = _kept_on_meta(func, *args, **(kwargs or {}))
            if moved is not None:
                return moved
        return func(*args, **(kwargs or {}))


def _is_usual(tensor: Any = None, mode: str = "", nonlinearity: str = "", **others: Any) -> bool:
    """Return whether a call of `kaiming_uniform_`, with which most layers begin, only fills a
    tensor without values.
    """
    if mode != "fan_in" or nonlinearity != "leaky_relu":
        return False
    with torch._C.DisableTorchFunction():  # this is not a question of the constructor
        return _is_on_meta(tensor) and tensor.dim() >= 2


_MOVES = frozenset({torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.xpu})
# Storages on meta, and the device that they would be on: the CPU for all others.
_DEVICES: WeakKeyDictionary[torch.UntypedStorage, torch.device] = WeakKeyDictionary()


def device_for_real(tensor: torch.Tensor) -> torch.device:
    """Return the device of a tensor; of one on meta the device that the model's code moves it
    to.
    """
    if not _is_on_meta(tensor):
        return tensor.device
    return _DEVICES.get(tensor.untyped_storage(), torch.device("cpu"))


def _kept_on_meta(
    func: Any, tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any
) -> Any:
    """Return the tensor that a move off the meta device gives; None if the call is no such move."""
    if not _is_on_meta(tensor):
        return None
    dtype, form = None, None
    try:
        if func is torch.Tensor.to:
            device, dtype, _, form = torch._C._nn._parse_to(*args, **kwargs)
        else:
            place = args[0] if args else kwargs.get("device")
            name = func.__name__
            device = (
                torch.device(name, place) if isinstance(place, int) else torch.device(place or name)
            )
    except (RuntimeError, TypeError):  # the call raises it too
        return None
    if device is None or device.type == "meta":
        return None
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, 0)
    copy = copy or device != device_for_real(tensor)
    moved = tensor.to(
        dtype=dtype or tensor.dtype, copy=copy, memory_format=form or torch.preserve_format
    )
    _DEVICES[moved.untyped_storage()] = device
    return moved


def _is_on_meta(value: object) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter) and value.is_meta  # type: ignore[attr-defined]


class CannotBuild(CkptError):
    """The model's constructor raised."""


def load(
    operand: str,
    kwargs: Mapping[str, Any] | None = None,
    materialize: bool = False,
    option: str = "--model",
) -> LoadedModel:
    """Return the model that `operand`, the value of `option`, names; runs the user's code, as
    ``import`` does.

    `kwargs` are passed to a class or a function. Raises `CkptError` if the operand, the import, the
    attribute or its value is wrong; a constructor's own failure is raised by `build`.
    """
    target = find(operand, _FORM, ", for example my_package.model:build")
    if isinstance(target, nn.Module):
        if kwargs:
            raise CkptError(
                f"{operand} is a module, not a factory: it takes no arguments",
                hint=f"leave them out: {option} {operand}",
            )
        return LoadedModel(operand, lambda real: copied(target, real), materialize)
    if not callable(target):
        raise CkptError(
            f"{operand} is not a model but {a(target)}",
            hint="name an nn.Module, a class of one, or a function that returns one",
        )
    return LoadedModel(operand, _factory(target, dict(kwargs or {}), operand, option), materialize)


def of_object(
    model: Any, kwargs: Mapping[str, Any] | None = None, materialize: bool = False
) -> LoadedModel:
    """Return the definition of a module, a class, a factory or an exported program, without
    changing the object.

    Raises `CkptError` if it is none of these.
    """
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, ExportedProgram):
        module = model.module()
        return LoadedModel("the program", lambda real: copied(module, real), materialize)
    if isinstance(model, nn.Module):
        return LoadedModel(type(model).__name__, lambda real: copied(model, real), materialize)
    if not callable(model):
        raise CkptError(
            f"{a(model)} is not a model", hint="pass a module, a program, or file.py:build"
        )
    name = getattr(model, "__name__", repr(model))
    return LoadedModel(name, _factory(model, dict(kwargs or {}), name, "--model"), materialize)


def find(operand: str, form: str, example: str = "") -> Any:
    """Return the object ``package.module:attr`` or ``path/to/file.py:attr``.

    Raises `CkptError`; its hint is the `form` of the operand, with an `example` if the operand has
    another form.
    """
    place, _, attr = operand.rpartition(":")
    if not place or not attr or os.sep in attr:
        hint = _did_you_mean(operand) or f"{form}{example}"
        raise CkptError(f"{operand!r} names no Python object", hint=hint)
    try:
        value: Any = _module(place, attr, form)
        for part in attr.split("."):
            with user_code(f"{operand} cannot be read"):
                names = [name for name in dir(value) if not name.startswith("_")]
                child = getattr(value, part, _ABSENT)
            if child is _ABSENT:
                close = difflib.get_close_matches(part, names, n=3) or _models(value)
                calls = " or ".join(f"{place}:{name}" for name in close)
                guess = f"; did you mean {calls}?" if close else ""
                raise CkptError(f"{place} has no attribute {attr!r}", hint=f"{form}{guess}")
            value = child
        return value
    except CkptError as error:
        if not place.endswith(".py") or "relative import" not in str(error.__cause__):
            raise
        name, folder = _in_package(Path(place).resolve())
        inside = "" if folder == Path.cwd() else f", in the folder {folder}"
        hint = f"the file is part of a package: name it {name}:{attr}{inside}"
        raise CkptError(error.message, hint=hint) from error


def _in_package(path: Path) -> tuple[str, Path]:
    """Return the dotted name of a module in a package, and the folder that the package is in."""
    folder, name = path.parent.parent, f"{path.parent.name}.{path.stem}"
    while (folder / "__init__.py").is_file():
        folder, name = folder.parent, f"{folder.name}.{name}"
    return name, folder


def _models(module: Any) -> list[str]:
    """Return up to three names of models, model classes and functions that the module defines."""
    names = []
    place = getattr(module, "__name__", None)
    for name, value in getattr(module, "__dict__", {}).items():
        is_defined_here = callable(value) and getattr(value, "__module__", None) == place
        if not name.startswith("_") and (is_defined_here or isinstance(value, nn.Module)):
            names.append(name)
    return names[:3]


def _did_you_mean(operand: str) -> str:
    """Return a hint with the operand as it should be written, if a file shows what was meant:
    ``net.py:build`` for ``net.build``, ``net.py::build`` and ``net:build``; else empty.
    """
    if Path(operand).is_file():
        return ""
    place, _, attr = re.sub(":+", ":", operand).rpartition(":")
    if not place:
        place, _, attr = operand.rpartition(".")
    modules = {f"{place}.py": attr, place: attr, f"{operand}.py": "FUNCTION"}
    for path, name in modules.items():
        if path.endswith(".py") and Path(path).is_file():
            return f"did you mean {path}:{name}?"
    return ""


def _module(place: str, attr: str, form: str) -> ModuleType:
    if place.endswith(".py"):
        return _from_file(Path(place), form)
    if not all(part.isidentifier() for part in place.split(".")):
        hint = _did_you_mean(f"{place}:{attr}") or form
        raise CkptError(f"{place!r} is neither a module nor a .py file", hint=hint)
    _keep_importable(os.getcwd())
    with user_code(f"{place} cannot be imported", imports=True):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if not f"{place}.".startswith(f"{error.name}."):
                raise
            raise CkptError(
                f"no module named {error.name!r} ({place})",
                hint=f"run it where `python -c 'import {place}'` works, or name the file:"
                " path/to/file.py:attr",
            ) from None


def _from_file(path: Path, form: str) -> ModuleType:
    if not path.is_file():
        what = "a directory" if path.is_dir() else "no such file"
        raise CkptError(f"{path}: {what}", hint=form)
    state = path.stat()
    stamp = (str(path.resolve()), state.st_mtime_ns, state.st_size)
    if stamp in _LOADED:
        return _LOADED[stamp]
    name = path.stem
    if not name.isidentifier() or name in sys.modules:
        name = f"_ckpttool_{name}"
    sources.note_read(str(path))
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None  # the name ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    _keep_importable(str(path.resolve().parent))
    with user_code(f"{path} cannot be imported", imports=True):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    _LOADED[stamp] = module
    return module


def _keep_importable(folder: str) -> None:
    """Keep the folder on the path, as ``python file.py`` does: a constructor may import from it
    later.
    """
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _factory(
    target: Callable[..., Any], kwargs: dict[str, Any], operand: str, option: str
) -> Callable[[bool], nn.Module]:
    on_meta: list[weakref.ref[nn.Module]] = []
    # A cached function would return the instance on meta again when a real one is needed.
    is_cached = hasattr(target, "cache_info")
    constructor = getattr(target, "__wrapped__", target) if is_cached else target

    def make(real: bool) -> nn.Module:
        _check_arguments(target, kwargs, operand, option)
        with contextlib.nullcontext() if real else torch.device("meta"):
            instance = constructor(**kwargs)
        if not isinstance(instance, nn.Module):
            raise CkptError(
                f"{operand} gives {a(instance)}, not an nn.Module",
                hint="name an nn.Module, a class of one, or a function that returns one",
            )
        if not real:
            on_meta.append(weakref.ref(instance))
        elif any(earlier() is instance for earlier in on_meta) and _has_meta(instance):
            raise CkptError(
                f"{operand} gives the model that it built on the meta device before, and its"
                " values are needed",
                hint="pass --materialize, or build a new model in each call",
            )
        module = sys.modules.get(getattr(target, "__module__", ""))
        # The next call of a factory that keeps the object would return it with the changes of this
        # one.
        if module and any(value is instance for value in vars(module).values()):
            return copied(instance, real)
        return instance

    return make


def _has_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _check_arguments(
    target: Callable[..., Any], kwargs: dict[str, Any], operand: str, option: str
) -> None:
    with contextlib.suppress(ValueError):  # some built-in functions have no signature
        signature = inspect.signature(target)
        try:
            signature.bind(**kwargs)
        except TypeError as error:
            parameters = ", ".join(map(str, signature.parameters.values()))
            raise CkptError(
                f"{operand} cannot be called with these arguments: {error}",
                hint=f"it takes ({parameters}); pass them as in {option} '{operand}(name=1)',"
                " or name a function without required parameters",
            ) from error


def copied(module: nn.Module, real: bool) -> nn.Module:
    """Return a deep copy; on meta unless `real`, with tied and overlapping tensors tied in the same
    way.
    """
    memo: dict[int, Any] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if type(tensor) is torch.nn.UninitializedBuffer:  # `deepcopy` copies lazy parameters only
            memo[id(tensor)] = _uninitialized(tensor, real)
            continue
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or tensor.is_quantized or tensor.is_nested:
            continue  # copied as it is
        if real and 0 not in tensor.stride():
            continue  # but for expanded tensors, `deepcopy` does the same
        place = tensor.untyped_storage()._cdata
        if place not in storages:
            storages[place] = _copied_storage(tensor, real)
        storage = storages[place]
        twin = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        twin.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, tensor.requires_grad)
        memo[id(tensor)] = twin
    return copy_of(module, memo, real)


def _uninitialized(buffer: torch.Tensor, real: bool) -> torch.Tensor:
    make: Any = torch.nn.UninitializedBuffer
    copy: torch.Tensor = make(device=buffer.device if real else "meta", dtype=buffer.dtype)
    return copy


def _copied_storage(tensor: torch.Tensor, real: bool) -> torch.UntypedStorage:
    """Return a copy of the storage of a tensor; without data unless `real`."""
    storage = tensor.untyped_storage()
    if real:
        return storage.clone()
    on_meta = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
    _DEVICES[on_meta] = device_for_real(tensor)
    return on_meta
