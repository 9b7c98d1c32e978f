"""Copy a live module: as `copy.deepcopy` does, and if that fails, without what cannot be copied.

Modules, parameters, buffers and hooks are always copied. Of other attributes, results of autograd
(a cached activation, a stored loss) are detached, and objects that nothing can copy (locks, files,
generators) are shared with the module.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

Memo = dict[int, Any]  # id of an object -> its copy, as in `copy.deepcopy`
_PICKLE_PROTOCOL = 4
_REGISTRIES = ("_parameters", "_buffers", "_modules")


def copy_module(module: nn.Module, memo: Memo, real: bool) -> nn.Module:
    """Return a deep copy of the module; `memo` holds copies that exist. Unless `real`, detached
    tensors are on meta.
    """
    given = dict(memo)
    try:
        complete: nn.Module = copy.deepcopy(module, memo)
        return complete
    except Exception:  # whatever the code of an object raises
        without: nn.Module = _Copier(given, real).module(module)
        return without


class _Copier:
    """Copies objects part by part, with the same memo."""

    def __init__(self, memo: Memo, real: bool) -> None:
        self.memo, self.real = memo, real
        self.keep: list[object] = []  # ids in the memo must not be used again

    def module(self, root: nn.Module) -> Any:
        """Return a copy of the module. All submodules exist before the first is filled: objects may
        refer to them.
        """
        parts = [part for part in root.modules() if id(part) not in self.memo]
        shells: list[tuple[nn.Module, nn.Module]] = []
        for part in parts:
            if not hasattr(type(part), "__deepcopy__"):
                shells.append((part, self._shell(part)))
        for part in parts:
            if id(part) not in self.memo and not self._copies(part):
                shells.append((part, self._shell(part)))
        for part, shell in shells:
            state = {}
            for name, value in _state_of(part).items():
                state[name] = self._registry(value) if name in _REGISTRIES else self.value(value)
            try:
                shell.__setstate__(state)
            except Exception:  # the class expects what could not be copied
                shell.__dict__.update(state)
        return self.memo[id(root)]

    def _shell(self, module: nn.Module) -> nn.Module:
        shell: nn.Module = type(module).__new__(type(module))
        self.memo[id(module)] = shell
        return shell

    def _registry(self, entries: Any) -> Any:
        """Return the parameters, buffers or submodules of a module, each copied: the live ones are
        never shared.
        """
        copies = type(entries)()
        for name, entry in entries.items():
            copies[name] = self.value(entry)
        return copies

    def value(self, value: Any) -> Any:
        """Return a copy of the value; the value itself if it needs no copy, or if nothing can copy
        it.
        """
        if id(value) in self.memo:
            return self.memo[id(value)]
        if self._copies(value):
            return self.memo.get(id(value), value)
        self.keep.append(value)
        if isinstance(value, torch.Tensor):
            self.memo[id(value)] = self._detached(value)
        elif isinstance(value, nn.Module):
            self.module(value)
        else:
            self._copy_parts(value)
        return self.memo.get(id(value), value)

    def _copies(self, value: Any) -> bool:
        """Return whether `copy.deepcopy` copies the value; its copy is in the memo then, unless it
        needs none.
        """
        before = len(self.memo)
        try:
            copy.deepcopy(value, self.memo)
        except Exception:
            while len(self.memo) > before:  # copies that are not complete
                self.memo.popitem()
            return False
        return True

    def _detached(self, tensor: torch.Tensor) -> torch.Tensor:
        values = self._values(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(values, tensor.requires_grad)
        return values

    def _values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, without data unless it is `real`, or of a kind that the meta device does
        not have.
        """
        if not self.real:
            try:
                return torch.empty_like(tensor, device="meta")
            except (RuntimeError, NotImplementedError):
                pass
        return tensor.clone()

    def _copy_parts(self, value: Any) -> None:
        """Copy an object as pickle would create it, if it can, with a copy of each part."""
        try:
            reduced = value.__reduce_ex__(_PICKLE_PROTOCOL)
            create, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
            new = create(*map(self.value, arguments))
            self.memo[id(value)] = new
            if hasattr(new, "__setstate__") and state is not None:
                new.__setstate__(self.value(state))
            elif state is not None:
                attributes, slots = state if isinstance(state, tuple) else (state, None)
                for name, part in {**(attributes or {}), **(slots or {})}.items():
                    setattr(new, name, self.value(part))
            for item in items or ():
                new.append(self.value(item))
            for name, part in pairs or ():
                new[self.value(name)] = self.value(part)
        except Exception:  # it stays the live object
            self.memo.pop(id(value), None)


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Return what pickle would keep of the module."""
    method = getattr(type(module), "__getstate__", None)
    if method is not None and method is not getattr(object, "__getstate__", None):
        try:
            state = method(module)
        except Exception:
            state = None
        if isinstance(state, dict):
            return state
    return vars(module)
