"""Whose code named a key: watches all user code that takes part in saving and loading, and notes
what it changed.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice, takewhile
from operator import and_, is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ckpttool.core.names import Hook
from ckpttool.tracing.memory import token
from ckpttool.tracing.recorder import Recorder
from ckpttool.tracing.user_code import short_path

_Runner = Callable[..., Any]  # runs (function, module path, *arguments)


class _HookChange(NamedTuple):
    """The last time a key got its value: the value's token, whose code did it, and when."""

    token: Any
    hook: Hook
    clock: int


class _Watched:
    """Replaces a hook or method, and has the watcher run it; a deep copy of the model gets a
    copy.
    """

    def __init__(self, function: Callable[..., Any], path: str, run: _Runner) -> None:
        self.function, self.path, self.run = function, path, run
        self.__wrapped__ = function  # callers see its signature
        if getattr(function, "_from_public_api", False):
            self._from_public_api = True  # torch looks at it: such a hook may return nothing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.function, self.path, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watched:
        return _Watched(copy.deepcopy(self.function, memo), self.path, self.run)


class Watcher:
    """Wrap the hooks and overridden methods of one fresh model, which behaves as before.

    `changes` then says for each key who gave it its value last, `failed` the innermost hook that
    raised.
    """

    def __init__(self, root: nn.Module, recorder: Recorder) -> None:
        self.recorder = recorder
        self.changes: dict[str, _HookChange] = {}
        self.failed: Hook | None = None
        self.paths = {
            id(module): path
            for path, module in reversed(list(root.named_modules(remove_duplicate=False)))
        }
        self._wrap_saving_hooks(root)
        for module in root.modules():
            self._wrap_hooks(module, "_load_state_dict_pre_hooks", self._load)
            self._wrap_hooks(module, "_load_state_dict_post_hooks", self._load)
            self._wrap_method(module, "state_dict", self._save)
            self._wrap_method(module, "_save_to_state_dict", self._save)
            self._wrap_method(module, "load_state_dict", self._load)
            self._wrap_method(module, "_load_from_state_dict", self._load)

    def hook_of(self, key: str, value: torch.Tensor) -> Hook | None:
        """Return whose code gave the key its value, if that was seen."""
        change = self.changes.get(key)
        if change is not None:
            return change.hook
        author = self.recorder.author_of(token(value))
        return author if isinstance(author, Hook) else None

    @property
    def where(self) -> str:
        """The hook that raised, as a part of an error message."""
        return f" in {self.failed}" if self.failed else ""

    def _wrap_saving_hooks(self, root: nn.Module) -> None:
        for module in root.modules():
            self._wrap_hooks(module, "_state_dict_pre_hooks", self._save_pre_hook)
            self._wrap_hooks(module, "_state_dict_hooks", self._save_hook)

    def _wrap_hooks(self, module: nn.Module, table: str, run: _Runner) -> None:
        hooks = module.__dict__.get(table) or {}
        for number, function in list(hooks.items()):
            if not isinstance(function, _Watched):
                hooks[number] = _Watched(function, self.paths.get(id(module), ""), run)

    def _wrap_method(self, module: nn.Module, name: str, run: _Runner) -> None:
        method = module.__dict__.get(name)
        if method is None:
            if getattr(type(module), name) is getattr(nn.Module, name):
                return
            method = getattr(module, name)
        object.__setattr__(module, name, _Watched(method, self.paths.get(id(module), ""), run))

    def _save_pre_hook(
        self, function: Callable[..., Any], _: str, module: nn.Module, prefix: str, *args: Any
    ) -> Any:
        with self._running(described(function, prefix[:-1])):
            result = function(module, prefix, *args)
        self._wrap_saving_hooks(module)  # it may have registered more
        return result

    def _save_hook(self, function: Callable[..., Any], _: str, *args: Any) -> Any:
        destination, prefix = args[1:3]
        hook = described(function, prefix[:-1])
        before, clock = dict(destination), self.recorder.clock
        with self._running(hook):
            result = function(*args)
        replaced = isinstance(result, Mapping) and not getattr(function, "_from_public_api", False)
        self._compare(before, result if replaced else destination, hook, clock)
        return result

    def _save(self, method: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
        destination = kwargs.get("destination", args[0] if args else None)
        hook = described(method, path)
        before = dict(destination) if isinstance(destination, Mapping) else {}
        clock = self.recorder.clock
        with self._running(hook):
            result = method(*args, **kwargs)
        after = result if isinstance(result, Mapping) else destination
        self._compare(before, after if isinstance(after, Mapping) else {}, hook, clock)
        return result

    def _load(self, function: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
        with self._running(described(function, path)):
            return function(*args, **kwargs)

    @contextmanager
    def _running(self, hook: Hook) -> Iterator[None]:
        outer, self.recorder.author = self.recorder.author, hook
        try:
            yield
        except Exception:
            self.failed = self.failed or hook
            raise
        finally:
            self.recorder.author = outer

    def _compare(
        self, before: Mapping[str, Any], after: Mapping[str, Any], hook: Hook, clock: int
    ) -> None:
        written = self.recorder.written_since(clock) if self.recorder.clock > clock else set()
        start = 0
        # skip the entries at the start that are the same: a hook deep in a large model changes few
        if not written:
            same = map(and_, map(is_, before, after), map(is_, before.values(), after.values()))
            start = sum(takewhile(bool, same))
        with quiet():
            for key, value in islice(after.items(), start, None):
                old = before.get(key, before)
                if old is value and not written:
                    continue
                mark = _mark(value)
                is_written = mark in written or mark[0] in written
                if not is_written and old is not before and mark == _mark(old):
                    continue
                change = self.changes.get(key)
                if change is None or change.token != mark or change.clock <= clock:
                    self.recorder.clock += 1
                    self.changes[key] = _HookChange(mark, hook, self.recorder.clock)


def has_saving_code(root: nn.Module) -> bool:
    """Return whether saving the model runs other code than `nn.Module`'s, which may change the
    model.
    """
    for module in root.modules():
        if module._state_dict_hooks or module._state_dict_pre_hooks:
            return True
        for name in ("state_dict", "_save_to_state_dict", "get_extra_state"):
            if name in vars(module) or getattr(type(module), name) is not getattr(nn.Module, name):
                return True
    return False


def _mark(value: Any) -> Any:
    return token(value) if isinstance(value, torch.Tensor) else ("object", id(value))


@contextmanager
def quiet() -> Iterator[None]:
    """Run code of ckpttool inside a recording: it is neither recorded nor given the answers for the
    user's code.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def described(function: Any, module: str) -> Hook:
    """Return the code behind a hook: inside partials, bound methods, callable objects and wrappers
    (torch's too).
    """
    for _ in range(16):  # wrappers may wrap each other in a cycle
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):  # a `_Watched` too
            function = function.__wrapped__
        elif inspect.ismethod(function):
            function = function.__func__
        elif not hasattr(function, "__code__") and hasattr(type(function).__call__, "__code__"):
            function = type(function).__call__
        else:
            break
    code = getattr(function, "__code__", None)
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    name = name.rpartition("<locals>.")[2] if not name.endswith("<lambda>") else name
    if code is None:
        return Hook(name, "<built-in>", 0, module)
    return Hook(name, short_path(code.co_filename), code.co_firstlineno, module)
