"""From a MODEL operand to a live module: imports the user's code; what goes wrong there becomes one clear error."""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ckpttool.core.errors import CkptError
from ckpttool.core.text import a
from ckpttool.core.values import dataclass
from ckpttool.io import sources
from ckpttool.tracing.output_capture import prints_once

_FORM = "a model is package.module:attr or path/to/file.py:attr"
_ABSENT = object()
# Files as they were when they were run: a model and its optimizer come from one module, not from two of one name.
_LOADED: dict[tuple[str, int, int], ModuleType] = {}
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


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model definition. `build()` gives a fresh instance each time, since some state_dict methods change the model.

    `operand` is what the user named; `make` calls the user's factory or copies the user's instance.
    """

    operand: str
    make: Callable[[bool], nn.Module] = field(repr=False)
    materialize: bool = False

    def build(self, materialize: bool | None = None, seed: int = 0) -> nn.Module:
        """A fresh instance: on meta, or with real weights where `materialize` (default: as loaded) says so.

        Raises `CannotBuild` with the user's own error where the constructor fails.
        """
        real = self.materialize if materialize is None else materialize
        what = f"{self.operand} cannot be built"
        with user_code(what, on_meta=not real, error=CannotBuild), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make(real)


class CannotBuild(CkptError):
    """The model's constructor raised."""


def load(
    operand: str, kwargs: Mapping[str, Any] | None = None, materialize: bool = False, option: str = "--model"
) -> LoadedModel:
    """The model that `operand` names, as the value of `option`; runs the user's code, as ``import`` does.

    `kwargs` are passed to a class or a function. Raises `CkptError` where the operand, the import, the attribute or
    what it gives is wrong; a constructor's own failure is raised by `build`.
    """
    target = find(operand, f"{_FORM}, for example my_package.model:build")
    if isinstance(target, nn.Module):
        if kwargs:
            raise CkptError(
                f"{operand} is a module, not a factory: it takes no arguments", hint=f"leave {option}-kwargs out"
            )
        return LoadedModel(operand, lambda real: copied(target, real), materialize)
    if not callable(target):
        raise CkptError(
            f"{operand} is no model but {a(target)}",
            hint="name an nn.Module, a class of one, or a function that returns one",
        )
    return LoadedModel(operand, _factory(target, dict(kwargs or {}), operand, option), materialize)


def of_object(model: Any, kwargs: Mapping[str, Any] | None = None, materialize: bool = False) -> LoadedModel:
    """The definition that a module, a class, a factory or an exported program is, without changing the object.

    Raises `CkptError` where it is none of these.
    """
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, ExportedProgram):
        module = model.module()
        return LoadedModel("the program", lambda real: copied(module, real), materialize)
    if isinstance(model, nn.Module):
        return LoadedModel(type(model).__name__, lambda real: copied(model, real), materialize)
    if not callable(model):
        raise CkptError(f"{a(model)} is no model", hint="pass a module, a program, or file.py:build")
    name = getattr(model, "__name__", repr(model))
    return LoadedModel(name, _factory(model, dict(kwargs or {}), name), materialize)


def find(operand: str, hint: str) -> Any:
    """What ``package.module:attr`` or ``path/to/file.py:attr`` names. Raises `CkptError` (of no such form: `hint`)."""
    place, found, attr = operand.rpartition(":")
    if not found or not place or not attr or os.sep in attr:
        raise CkptError(f"{operand!r} names no Python object", hint=hint)
    try:
        return _attribute(_module(place), attr, operand)
    except CkptError as error:
        if place.endswith(".py") and "relative import" in str(error.__cause__):
            raise CkptError(error.message, hint=_as_package(Path(place).resolve(), attr)) from error
        raise


def _as_package(path: Path, attr: str) -> str:
    """The hint for a file that imports its neighbours by relative names: its name as a module of its package."""
    folder, parts = path.parent.parent, [path.parent.name, path.stem]
    while (folder / "__init__.py").is_file():
        folder, parts = folder.parent, [folder.name, *parts]
    there = "" if folder == Path.cwd() else f", in the folder {folder}"
    return f"the file is part of a package: name it {'.'.join(parts)}:{attr}{there}"


def _factory(
    target: Callable[..., Any], kwargs: dict[str, Any], operand: str, option: str = "--model"
) -> Callable[[bool], nn.Module]:
    def make(real: bool) -> nn.Module:
        _check_arguments(target, kwargs, operand, option)
        with contextlib.nullcontext() if real else torch.device("meta"):
            built = target(**kwargs)
        if not isinstance(built, nn.Module):
            raise CkptError(
                f"{operand} gives {a(built)}, not an nn.Module",
                hint="name an nn.Module, a class of one, or a function that returns one",
            )
        return copied(built, real) if _is_kept(target, built) else built

    return make


def _is_kept(target: Callable[..., Any], built: nn.Module) -> bool:
    """True where the factory hands out an object that it keeps, which the next call would find changed."""
    module = sys.modules.get(getattr(target, "__module__", ""))
    return hasattr(target, "cache_info") or any(value is built for value in (vars(module) if module else {}).values())


def _check_arguments(target: Callable[..., Any], kwargs: dict[str, Any], operand: str, option: str) -> None:
    try:
        signature = inspect.signature(target)
    except ValueError:  # of some built-in ones nobody knows it
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        parameters = ", ".join(map(str, signature.parameters.values()))
        raise CkptError(
            f"{operand} cannot be called with these arguments: {error}",
            hint=f"it takes ({parameters}); pass them with {option}-kwargs '{{\"name\": value}}', or name a function"
            " without required parameters",
        ) from error


def copied(module: nn.Module, real: bool) -> nn.Module:
    """A deep copy of `module`; on meta unless `real`, with tied and overlapping tensors tied in the same way."""
    memo: dict[int, Any] = {}
    if not real:
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            moved = _meta_twin(tensor, storages)
            if moved is not None:
                memo[id(tensor)] = moved
    return copy.deepcopy(module, memo)


def _meta_twin(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor | None:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.is_quantized:
        return None
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
    twin = torch.empty(0, dtype=tensor.dtype, device="meta")
    twin.set_(storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
    return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _from_file(Path(place))
    if not all(part.isidentifier() for part in place.split(".")):
        raise CkptError(f"{place!r} is neither a module nor a .py file", hint=_FORM)
    _keep_importable(os.getcwd())
    with user_code(f"{place} cannot be imported"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if not f"{place}.".startswith(f"{error.name}."):
                raise
            raise CkptError(
                f"no module named {error.name!r} ({place})",
                hint=f"run it where `python -c 'import {place}'` works, or name the file: path/to/file.py:attr",
            ) from None


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        what = "a directory" if path.is_dir() else "no such file"
        raise CkptError(f"{path}: {what}", hint=_FORM)
    state = path.stat()
    stamp = (str(path.resolve()), state.st_mtime_ns, state.st_size)
    if stamp in _LOADED:
        return _LOADED[stamp]
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"_ckpttool_{path.stem}"
    sources.note_read(str(path))
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None  # its name ends as a Python file's
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    _keep_importable(str(path.resolve().parent))
    with user_code(f"{path} cannot be imported"):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    _LOADED[stamp] = module
    return module


def _keep_importable(folder: str) -> None:
    """A constructor may import its neighbours late, so the folder stays on the path as under ``python file.py``."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _attribute(module: ModuleType, attr: str, operand: str) -> Any:
    target: Any = module
    for part in attr.split("."):
        with user_code(f"{operand} cannot be read"):
            names = [name for name in dir(target) if not name.startswith("_")]
            found = getattr(target, part, _ABSENT)
        if found is _ABSENT:
            close = difflib.get_close_matches(part, names, n=3) or _models(target)
            where = operand.rpartition(":")[0]
            place = f"; did you mean {' or '.join(f'{where}:{name}' for name in close)}?" if close else ""
            raise CkptError(f"{where} has no attribute {attr!r}", hint=f"{_FORM}{place}")
        target = found
    return target


def _models(module: Any) -> list[str]:
    """What the module defines that could have been meant: models, model classes, functions."""
    here = getattr(module, "__name__", None)
    found = []
    for name, value in vars(module).items() if hasattr(module, "__dict__") else ():
        own = getattr(value, "__module__", None) == here and callable(value)
        if not name.startswith("_") and (own or isinstance(value, nn.Module)):
            found.append(name)
    return found[:3]


@contextlib.contextmanager
def user_code(what: str, on_meta: bool = False, error: type[CkptError] = CkptError) -> Iterator[None]:
    """Runs the user's code: its prints go to stderr, and whatever it raises becomes an `error` that says where."""
    try:
        with prints_once():
            yield
    except CkptError:
        raise
    except (Exception, SystemExit) as raised:
        raise error(f"{what}: {describe(raised)}", hint=_hint(raised, on_meta)) from raised


def describe(error: BaseException) -> str:
    """One line: the error's class, its text, and the file and line in the user's code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {textwrap.shorten(lines[0], 240)}" if lines else type(error).__name__
    place = raised_at(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename is not None:  # else the user's code raised it
        place = f"{shown(error.filename)}:{error.lineno}"
    return f"{text} ({place})" if place else text


def raised_at(trace: TracebackType | None) -> str | None:
    """``file:line`` of the last frame that is neither torch's nor ours nor the import system's."""
    ours = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), str(Path(os.__file__).parent))
    frames = [f for f in traceback.extract_tb(trace) if not f.filename.startswith("<")]
    own = [f for f in frames if not f.filename.startswith(ours) and "site-packages" not in f.filename]
    other = [f for f in frames if not f.filename.startswith(ours[:2])]
    last = (own or other)[-1:]
    return f"{shown(last[0].filename)}:{last[0].lineno}" if last else None


def shown(filename: str) -> str:
    """A path as it is read best: relative where it lies below the working directory."""
    with contextlib.suppress(ValueError, OSError):
        return str(Path(filename).relative_to(Path.cwd()))
    return filename


def failed_on_meta(error: BaseException) -> bool:
    """True where the error says that something cannot be done with a tensor that has no values."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (RuntimeError, NotImplementedError, TypeError, ValueError)) and says_meta(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def says_meta(text: str) -> bool:
    """True where an error's text speaks of the meta device."""
    return any(sign in text for sign in _META_SIGNS)


def _hint(error: BaseException, on_meta: bool) -> str:
    if on_meta and failed_on_meta(error):
        return (
            "this constructor needs real tensors, and it ran on the meta device: add --materialize to build it for real"
        )
    if isinstance(error, ModuleNotFoundError):
        return f"the model's code needs {error.name}: run ckpttool in the environment that the model runs in"
    if isinstance(error, SystemExit):
        return "the module exits when it is imported: put the script's part under `if __name__ == '__main__':`"
    if on_meta:
        return "fix it there; if it only fails on the meta device, add --materialize to build it for real"
    return "fix it there: the same happens in plain Python"
