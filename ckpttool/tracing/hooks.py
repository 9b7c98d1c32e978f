"""Who renamed it: watches all user code that takes part in `state_dict()`, and notes what each piece changed."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice, takewhile
from operator import and_, is_
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ckpttool.core.names import Hook
from ckpttool.core.values import dataclass
from ckpttool.tracing.build_model import shown
from ckpttool.tracing.recorder.memory import token
from ckpttool.tracing.recorder.recorder import Recorder

_SAVE_METHODS = ("state_dict", "_save_to_state_dict")
_LOAD_METHODS = ("load_state_dict", "_load_from_state_dict")


_Runner = Callable[..., Any]  # runs (function, module path, *arguments)


@dataclass(frozen=True, slots=True)
class _Change:
    """The last time a key got its value: the value's token, whose code did it, and when."""

    token: Any
    hook: Hook
    clock: int


class _Watched:
    """Stands in a hook's or method's place, and has the watcher run it; a deep copy of the model gets a copy of it."""

    def __init__(self, function: Callable[..., Any], path: str, run: _Runner) -> None:
        self.function, self.path, self.run = function, path, run
        self.__wrapped__ = function  # its signature is the one that callers ask for
        if getattr(function, "_from_public_api", False):
            self._from_public_api = True  # torch looks at it: such a hook may return nothing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.function, self.path, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watched:
        return _Watched(copy.deepcopy(self.function, memo), self.path, self.run)


class Watcher:
    """Wraps the hooks and overridden methods of one fresh model, which behaves as before.

    `changes` then says for each key who gave it its value last, `failed` the innermost hook that raised.
    """

    def __init__(self, root: nn.Module, recorder: Recorder) -> None:
        self.recorder = recorder
        self.changes: dict[str, _Change] = {}
        self.failed: Hook | None = None
        self.paths = {id(module): path for path, module in reversed(list(root.named_modules(remove_duplicate=False)))}
        self._wrap_saving(root)
        for module in root.modules():
            self._wrap(module, "_load_state_dict_pre_hooks", self._load)
            self._wrap(module, "_load_state_dict_post_hooks", self._load)
            for name in _SAVE_METHODS:
                self._wrap_method(module, name, self._save_method)
            for name in _LOAD_METHODS:
                self._wrap_method(module, name, self._load)

    def hook_of(self, key: str, value: torch.Tensor) -> Hook | None:
        """Whose code gave the key its value, as far as that was seen."""
        change = self.changes.get(key)
        if change is not None:
            return change.hook
        author = self.recorder.author_of(token(value))
        return author if isinstance(author, Hook) else None

    def _wrap_saving(self, root: nn.Module) -> None:
        for module in root.modules():
            self._wrap(module, "_state_dict_pre_hooks", self._pre_hook)
            self._wrap(module, "_state_dict_hooks", self._post_hook)

    def _wrap(self, module: nn.Module, table: str, run: _Runner) -> None:
        hooks = module.__dict__.get(table) or {}
        for number, function in [item for item in hooks.items() if not isinstance(item[1], _Watched)]:
            hooks[number] = _Watched(function, self.paths.get(id(module), ""), run)

    def _wrap_method(self, module: nn.Module, name: str, run: _Runner) -> None:
        own = module.__dict__.get(name)
        if own is None and getattr(type(module), name) is getattr(nn.Module, name):
            return
        method = own if own is not None else getattr(module, name)
        object.__setattr__(module, name, _Watched(method, self.paths.get(id(module), ""), run))

    def _pre_hook(self, function: Callable[..., Any], _: str, module: nn.Module, prefix: str, *args: Any) -> Any:
        with self._running(described(function, prefix[:-1])):
            result = function(module, prefix, *args)
        self._wrap_saving(module)  # it may have registered more of them
        return result

    def _post_hook(self, function: Callable[..., Any], path: str, *args: Any) -> Any:
        destination, prefix = args[1:3]
        hook = described(function, prefix[:-1])
        before, clock = dict(destination), self.recorder.clock
        with self._running(hook):
            result = function(*args)
        replaced = isinstance(result, Mapping) and not getattr(function, "_from_public_api", False)
        self._compare(before, result if replaced else destination, hook, clock)
        return result

    def _save_method(self, method: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("destination", args[0] if args else None)
        hook = described(method, path)
        before, clock = dict(given) if isinstance(given, Mapping) else {}, self.recorder.clock
        with self._running(hook):
            result = method(*args, **kwargs)
        after = result if isinstance(result, Mapping) else given
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

    def _compare(self, before: Mapping[str, Any], after: Mapping[str, Any], hook: Hook, clock: int) -> None:
        written = self.recorder.written_since(clock) if self.recorder.clock > clock else set()
        start = 0 if written else _unchanged(before, after)
        with quiet():
            for key, value in islice(after.items(), start, None):
                old = before.get(key, before)
                if old is value and not written:
                    continue
                mark = _mark(value)
                if old is not before and mark == _mark(old) and mark[0] not in written and mark not in written:
                    continue
                change = self.changes.get(key)
                if change is None or change.token != mark or change.clock <= clock:
                    self.recorder.clock += 1
                    self.changes[key] = _Change(mark, hook, self.recorder.clock)


def _unchanged(before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """How many entries at the start are the same objects: a hook deep in a large model changes the last few keys."""
    same = map(and_, map(is_, before, after), map(is_, before.values(), after.values()))
    return sum(takewhile(bool, same))


@contextmanager
def quiet() -> Iterator[None]:
    """What runs here is ours: neither recorded nor answered for the user's code."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _mark(value: Any) -> Any:
    return token(value) if isinstance(value, torch.Tensor) else ("object", id(value))


def described(function: Any, module: str) -> Hook:
    """The code behind a hook: partials, bound methods, callable objects and wrappers (torch's too) looked through."""
    for _ in range(16):  # wrappers of wrappers; a cycle would be the user's joke
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
    return Hook(name, shown(code.co_filename), code.co_firstlineno, module)
