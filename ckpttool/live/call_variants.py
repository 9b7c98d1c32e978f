"""Call variants of unflattened programs: ``foo``, ``foo@1``, … are one submodule, and change together.

`torch.export.unflatten` gives a submodule one graph for each way it is called (pytorch#137013), each under a name of
its own; where the call signature was preserved, a dispatcher holds some of them where no FQN leads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.text import a
from ckpttool.core.values import dataclass
from ckpttool.naming.call_variants import split
from ckpttool.tracing.recorder.memory import Token, token


@dataclass(frozen=True, slots=True, eq=False)
class _Home:
    """One place where a variant stands: ``parent._modules[name]``. `fqn` is None where no FQN leads to it."""

    fqn: str | None
    parent: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        found = self.parent._modules[self.name]
        assert found is not None
        return found


def variants(module: nn.Module, fqn: str, *, shared: bool = True) -> tuple[str, ...]:
    """Every FQN of the submodule `fqn` (in any of its spellings) in `module`: its call variants at every level.

    `shared` adds the variants of other paths at which the same submodule stands, as far as an unflattened program can
    tell: the same class with the same tensors, at least one. Raises `CkptError` where there is no such submodule.
    """
    return tuple(dict.fromkeys(home.fqn for home in _homes(module, fqn, shared) if home.fqn is not None))


def swap_module(module: nn.Module, fqn: str, new: nn.Module, *, shared: bool = True) -> tuple[str, ...]:
    """Puts `new` in the place of every variant of the submodule `fqn`, and returns their FQNs.

    The surrounding graphs call `new` as they called the old graph: with tensors, positionally, unless its signature
    was preserved at export. Raises `Refused`, with nothing changed, where `new` cannot be called like that.
    """
    if not isinstance(new, nn.Module):
        raise CkptError(f"{fqn}: {a(new)} is no nn.Module", hint="swap_attribute changes parameters and buffers")
    homes = _homes(module, fqn, shared)
    problems = [problem for home in homes for problem in _uncallable(home, new)]
    if problems:
        raise Refused(
            f"{type(new).__name__} cannot take the calls of {fqn}",
            hint="export with preserve_module_call_signature=(FQN,) to have the submodule called as in the model",
            problems=list(dict.fromkeys(problems)),
        )
    for home in homes:
        home.parent._modules[home.name] = new
    return tuple(dict.fromkeys(home.fqn for home in homes if home.fqn is not None))


def swap_attribute(
    module: nn.Module, fqn: str, new: Any | Callable[[Any], Any], *, shared: bool = True
) -> tuple[str, ...]:
    """Sets the parameter, buffer or plain attribute `fqn` in every variant of its submodule, and returns the FQNs.

    A function gets the value that is there and returns the new one. Tensors must keep shape and dtype, which the graphs
    were specialised to; a plain tensor for a parameter becomes a parameter like the old one. Raises `Refused`, with
    nothing changed, where the value does not fit or the variants hold different ones.
    """
    path, _, name = fqn.rpartition(".")
    holders = _holders(module, path, shared)
    places = [(where, *at) for holder, where in holders if (at := _place(holder, name, fqn)) is not None]
    if not places:
        raise CkptError(f"{path or 'the module'} has no attribute {name!r}", hint="variants() lists submodules")
    old = places[0][1][name]
    others = [where for where, at, _ in places if not _same_value(at[name], old)]
    if others:
        problems = [Problem(f"not the value of {places[0][0]}.{name}", f"{where}.{name}") for where in others]
        raise Refused(f"the variants of {fqn} hold different values", hint="set them one by one", problems=problems)
    fitted = _fitted(old, new(old) if _is_function(new) else new, fqn, places[0][2])
    for _, table, _ in places:
        table[name] = fitted
    return tuple(dict.fromkeys(f"{where}.{name}".lstrip(".") for where, _, _ in places if where is not None))


# Which submodules are variants


def _homes(root: nn.Module, fqn: str, shared: bool) -> list[_Home]:
    if not fqn:
        raise CkptError("the root module has no variants", hint="name a submodule")
    homes = _path_homes(root, fqn)
    if not homes:
        raise CkptError(f"no submodule {fqn!r}", hint="`dict(module.named_modules())` lists them")
    if shared:
        seen = {home.fqn for home in homes}
        for path in _twins(root, homes[0].module):
            if path not in seen:
                homes += _path_homes(root, path)
                seen.update(home.fqn for home in homes)
    return homes


def _path_homes(root: nn.Module, fqn: str) -> list[_Home]:
    """The homes of every variant of the path, level by level; FQNs that can be written first."""
    parents: list[tuple[str | None, nn.Module]] = [("", root)]
    homes: list[_Home] = []
    for segment in fqn.split("."):
        bodies = [body for fqn_, parent in parents for body in _bodies(fqn_, parent)]
        homes = _family(bodies, segment)
        parents = [(home.fqn, home.module) for home in homes]
    return homes


def _bodies(fqn: str | None, module: nn.Module) -> Iterator[tuple[str | None, nn.Module]]:
    """The module itself, and behind a dispatcher the modules that it calls, to which no FQN leads."""
    yield fqn, module
    for body in _call_modules(module):
        yield None, body


def _call_modules(module: nn.Module) -> list[nn.Module]:
    found = {id(m): m for m in getattr(module, "_call_modules", ()) if isinstance(m, nn.Module)}
    return list(found.values())


def _family(bodies: list[tuple[str | None, nn.Module]], segment: str) -> list[_Home]:
    """The children `segment` of all bodies, with those that are call variants of it."""
    children = [
        _Home(None if fqn is None else f"{fqn}.{name}".lstrip("."), body, name)
        for fqn, body in bodies
        for name, child in body._modules.items()
        if child is not None
    ]
    named = [home for home in children if home.name == segment]
    base = split(segment)[0]
    if base != segment:  # the name of a variant, unless a module of the user's own is called so
        roots = [home for home in children if home.name == base]
        if roots and named and _is_same(roots[0].module, named[0].module):
            named = roots
    if not named:
        return []
    root = named[0]
    family = [
        home
        for home in children
        if (home.name == root.name or split(home.name)[0] == root.name) and _is_same(root.module, home.module)
    ]
    return sorted(family, key=lambda home: (home.fqn is None, home.parent is not root.parent))


def _is_same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules are one submodule of the model: the same class, and the same tensors where they have any."""
    if one is other:
        return True
    types = {_class_of(one), _class_of(other)} - {None}
    if len(types) > 1:
        return False
    mine, theirs = _tensors(one), _tensors(other)
    common = mine.keys() & theirs.keys()
    if not common:
        return not mine and not theirs and len(types) == 1
    return all(mine[name] == theirs[name] for name in common)


def _class_of(module: nn.Module) -> str | None:
    """The class that the submodule had in the model, where torch kept its name."""
    found = getattr(module, "_ty", None)
    return found if isinstance(found, str) else None


def _tensors(module: nn.Module) -> Mapping[str, Token]:
    """The tensors of its state dict; torch gives non-persistent buffers of a shared module one copy a path."""
    body = next(iter(_call_modules(module)), module)
    return {
        name: token(tensor)
        for name, tensor in body.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    }


def _twins(root: nn.Module, module: nn.Module) -> list[str]:
    """Other paths of the same submodule: the same class and the same tensors, of which there must be some."""
    mine, own = _tensors(module), _class_of(module)
    return [
        path
        for path, other in root.named_modules(remove_duplicate=False)
        if path and (other is module or (mine and _class_of(other) in (own, None) and _tensors(other) == mine))
    ]


# Whether what is put there fits


def _uncallable(home: _Home, new: nn.Module) -> Iterator[Problem]:
    graph = getattr(home.parent, "graph", None)
    if not isinstance(graph, torch.fx.Graph):
        return
    signature = inspect.signature(new.forward)
    for node in graph.nodes:
        if node.op == "call_module" and node.target == home.name:
            try:
                signature.bind(*node.args, **node.kwargs)
            except TypeError as error:
                given = ", ".join([*map(str, node.args), *(f"{key}=…" for key in node.kwargs)])
                yield Problem(f"called with ({given}): {error}", home.fqn or home.name)


def _holders(root: nn.Module, path: str, shared: bool) -> list[tuple[nn.Module, str | None]]:
    """Every module that holds the attributes of the submodule at `path`, with its FQN where it has one."""
    if not path:
        return [(root, "")]
    homes = _homes(root, path, shared)
    return [(body, fqn) for home in homes for fqn, body in _bodies(home.fqn, home.module)]


def _place(holder: nn.Module, name: str, fqn: str) -> tuple[dict[str, Any], type] | None:
    """The dict of `holder` that has the attribute, with the class of what is in it, or None where none has it."""
    if name in holder._modules:
        raise CkptError(f"{fqn} is a submodule", hint="swap_module changes it")
    tables: tuple[tuple[Any, type], ...] = (
        (holder._parameters, nn.Parameter),
        (holder._buffers, torch.Tensor),
        (holder.__dict__, object),
    )
    return next(((table, kind) for table, kind in tables if name in table), None)


def _is_function(new: Any) -> bool:
    return callable(new) and not isinstance(new, (nn.Module, type))


def _same_value(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = type(one) is type(other) and one.dtype == other.dtype
        return token(one) == token(other) or (alike and torch.equal(one, other))
    return one is other or (type(one) is type(other) and bool(one == other))


def _fitted(old: object, new: object, fqn: str, kind: type) -> object:
    """`new` as it can stand for `old`, or where that is None among objects of `kind`."""
    if new is None or (old is None and isinstance(new, kind)):
        return new
    if old is None:
        raise Refused(f"{fqn} is a {kind.__name__} or None, the new value {a(new)}", hint=f"give it a {kind.__name__}")
    if not isinstance(old, torch.Tensor):
        if type(new) is not type(old):
            raise Refused(f"{fqn} is {a(old)}, the new value {a(new)}", hint="give it the same type")
        return new
    if not isinstance(new, torch.Tensor):
        raise Refused(f"{fqn} is a tensor, the new value {a(new)}", hint="give it a tensor")
    for what in ("shape", "dtype", "device"):
        if getattr(new, what) != getattr(old, what):
            raise Refused(
                f"{fqn} has the {what} {_shown(getattr(old, what))}, the new value {_shown(getattr(new, what))}",
                hint="the program's graphs were specialised to it: export the changed model again",
            )
    if isinstance(old, nn.Parameter) and not isinstance(new, nn.Parameter):
        return nn.Parameter(new.detach(), old.requires_grad)
    return new


def _shown(value: object) -> object:
    return list(value) if isinstance(value, torch.Size) else value
