"""Find the Python object that ``package.module:attr`` or ``path/to/file.py:attr`` names."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ckpttool.core.errors import CkptError
from ckpttool.io import sources
from ckpttool.tracing.user_code import user_code

_ABSENT = object()
# By path and state of the file: a model and its optimizer come from one module, not from two with
# the same name.
_LOADED: dict[tuple[str, int, int], ModuleType] = {}


def find_object(operand: str, form: str, example: str = "") -> Any:
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
            if not _is_part_of(place, error.name):  # an import in the module failed
                raise
            raise CkptError(
                f"no module named {error.name!r} ({place})",
                hint=f"run it where `python -c 'import {place}'` works, or name the file:"
                " path/to/file.py:attr",
            ) from None


def _is_part_of(module: str, package: str | None) -> bool:
    return f"{module}.".startswith(f"{package}.")


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
