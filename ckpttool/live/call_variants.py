"""Call variants of unflattened programs: ``foo``, ``foo@1``, ... are one submodule, and change
together.

`torch.export.unflatten` gives a submodule one graph for each way it is called (pytorch#137013),
each with its own name; if the call signature was preserved, a dispatcher holds some of them, to
which no FQN leads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.text import a
from ckpttool.live.same_value import same_value
from ckpttool.naming.match import split_call
from ckpttool.tracing.memory import Token, token


class _Placement(NamedTuple):
    """One place of a variant: ``parent._modules[name]``. `fqn` is None if it has none."""

    fqn: str | None
    parent: nn.Module
    name: str
    module: nn.Module


def variants(module: nn.Module, fqn: str, *, shared: bool = True) -> tuple[str, ...]:
    """Return every FQN of the submodule `fqn` (in any of its spellings) in `module`: its call
    variants at every level.

    `shared` adds the variants of other paths to the same submodule, as far as an unflattened
    program can tell: the same class with the same tensors, at least one. Raises `CkptError` if
    there is no such submodule.
    """
    return _fqns(_placements(module, fqn, shared))


def swap_module(
    module: nn.Module, fqn: str, new: nn.Module, *, shared: bool = True
) -> tuple[str, ...]:
    """Replace every variant of the submodule `fqn` by `new`, and return their FQNs.

    The surrounding graphs call `new` as they called the old graph: with tensors, positionally,
    unless its signature was preserved at export. Raises `Refused`, with nothing changed, if `new`
    cannot be called like that.
    """
    if not isinstance(new, nn.Module):
        raise CkptError(
            f"{fqn}: {a(new)} is not an nn.Module",
            hint="swap_attribute changes parameters and buffers",
        )
    placements = _placements(module, fqn, shared)
    problems: dict[Problem, None] = {}
    for placement in placements:
        for node in _calls_of(placement):
            try:
                inspect.signature(new.forward).bind(*node.args, **node.kwargs)
            except TypeError as error:
                given = ", ".join([*map(str, node.args), *(f"{key}=…" for key in node.kwargs)])
                problem = Problem(
                    f"called with ({given}): {error}", placement.fqn or placement.name
                )
                problems[problem] = None
    if problems:
        raise Refused(
            f"{type(new).__name__} cannot take the calls of {fqn}",
            hint="export with preserve_module_call_signature=(FQN,) to have the submodule called"
            " as in the model",
            problems=list(problems),
        )
    for placement in placements:
        placement.parent._modules[placement.name] = new
    return _fqns(placements)


def swap_attribute(
    module: nn.Module, fqn: str, new: Any | Callable[[Any], Any], *, shared: bool = True
) -> tuple[str, ...]:
    """Set the parameter, buffer or plain attribute `fqn` in every variant of its submodule, and
    return the FQNs.

    A function gets the present value and returns the new one. Tensors must keep shape and dtype, to
    which the graphs were specialised; a plain tensor for a parameter becomes a parameter like the
    old one. Raises `Refused`, with nothing changed, if the value does not fit or the variants hold
    different ones.
    """
    slots = _attribute_slots(module, fqn, shared)
    first = slots[0]
    problems = []
    for slot in slots:
        if not same_value(slot.value, first.value):
            text = f"not the value of {first.path}.{first.name}"
            problems.append(Problem(text, f"{slot.path}.{slot.name}"))
    if problems:
        raise Refused(
            f"the variants of {fqn} hold different values",
            hint="set them one by one",
            problems=problems,
        )
    is_function = callable(new) and not isinstance(new, (nn.Module, type))
    value = _fitted(first.value, new(first.value) if is_function else new, fqn, first.kind)
    fqns: dict[str, None] = {}
    for slot in slots:
        slot.table[slot.name] = value
        if slot.path is not None:
            fqns[f"{slot.path}.{slot.name}".lstrip(".")] = None
    return tuple(fqns)


class _AttributeSlot(NamedTuple):
    """The place in which a variant of a submodule keeps an attribute: a table of its parameters, of
    its buffers, or of other attributes. `path` is None for a variant without an FQN.
    """

    path: str | None
    table: dict[str, Any]
    name: str
    kind: type

    @property
    def value(self) -> Any:
        return self.table[self.name]


def _attribute_slots(module: nn.Module, fqn: str, shared: bool) -> list[_AttributeSlot]:
    """Return where all variants keep the attribute. Raises `CkptError` if it is a submodule, or if
    none has it.
    """
    parent, _, name = fqn.rpartition(".")
    bodies: list[tuple[str | None, nn.Module]] = [("", module)]
    if parent:
        bodies = []
        for placement in _placements(module, parent, shared):
            bodies += _bodies(placement.fqn, placement.module)
    slots = []
    for path, body in bodies:
        if name in body._modules:
            raise CkptError(f"{fqn} is a submodule", hint="swap_module changes it")
        tables: tuple[tuple[Any, type], ...] = (
            (body._parameters, nn.Parameter),
            (body._buffers, torch.Tensor),
            (body.__dict__, object),
        )
        for table, kind in tables:
            if name in table:
                slots.append(_AttributeSlot(path, table, name, kind))
                break
    if not slots:
        text = f"{parent or 'the module'} has no attribute {name!r}"
        raise CkptError(text, hint="variants() lists submodules")
    return slots


# Which submodules are variants


def _calls_of(placement: _Placement) -> Iterator[torch.fx.Node]:
    """Yield the calls of the module in the graph around it."""
    graph = getattr(placement.parent, "graph", None)
    if isinstance(graph, torch.fx.Graph):
        for node in graph.nodes:
            if node.op == "call_module" and node.target == placement.name:
                yield node


def _fqns(placements: list[_Placement]) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(placement.fqn for placement in placements if placement.fqn is not None)
    )


def _placements(root: nn.Module, fqn: str, shared: bool) -> list[_Placement]:
    if not fqn:
        raise CkptError("the root module has no variants", hint="name a submodule")
    placements = _path_placements(root, fqn)
    if not placements:
        raise CkptError(f"no submodule {fqn!r}", hint="`dict(module.named_modules())` lists them")
    if shared:
        module = placements[0].module
        tensors = _tensors(module)
        seen = {placement.fqn for placement in placements}
        for path, other in root.named_modules(remove_duplicate=False):
            if not path or path in seen:
                continue
            has_same_tensors = bool(tensors) and _tensors(other) == tensors
            if other is module or (has_same_tensors and _may_have_one_class(module, other)):
                placements += _path_placements(root, path)
                seen.update(placement.fqn for placement in placements)
    return placements


def _path_placements(root: nn.Module, fqn: str) -> list[_Placement]:
    """Return the placements of every variant of the path, level by level; those with an FQN first.

    If the program has `layers` and `layers@1`, each with `0` and `0@1`, ``layers.0`` has four.
    """
    parents: list[tuple[str | None, nn.Module]] = [("", root)]
    placements: list[_Placement] = []
    for segment in fqn.split("."):
        children: list[_Placement] = []
        for parent_path, parent in parents:
            for path, body in _bodies(parent_path, parent):
                children += _children(path, body)
        placements = _variants_of(segment, children)
        parents = [(placement.fqn, placement.module) for placement in placements]
    return placements


def _children(path: str | None, body: nn.Module) -> Iterator[_Placement]:
    for name, child in body._modules.items():
        if child is not None:
            fqn = None if path is None else f"{path}.{name}".lstrip(".")
            yield _Placement(fqn, body, name, child)


def _bodies(fqn: str | None, module: nn.Module) -> Iterator[tuple[str | None, nn.Module]]:
    """Yield the module, and behind a dispatcher the modules that it calls, to which no FQN
    leads.
    """
    yield fqn, module
    for body in _call_modules(module):
        yield None, body


def _call_modules(module: nn.Module) -> list[nn.Module]:
    called = {id(m): m for m in getattr(module, "_call_modules", ()) if isinstance(m, nn.Module)}
    return list(called.values())


def _variants_of(segment: str, children: list[_Placement]) -> list[_Placement]:
    """Return the children with the name `segment`, and their call variants.

    children  gate, gate@1, gate@2, head     gate@1  ─▶  base gate  ─▶  gate, gate@1, gate@2

    A user's own module may be called ``gate@1``: it is a family of its own.
    """
    named = [placement for placement in children if placement.name == segment]
    base = split_call(segment)[0]
    if base != segment:
        roots = [placement for placement in children if placement.name == base]
        if roots and named and _is_same(roots[0].module, named[0].module):
            named = roots
    if not named:
        return []
    root = named[0]
    family = []
    for placement in children:
        has_name = root.name in (placement.name, split_call(placement.name)[0])
        if has_name and _is_same(root.module, placement.module):
            family.append(placement)
    return sorted(
        family, key=lambda placement: (placement.fqn is None, placement.parent is not root.parent)
    )


def _is_same(left: nn.Module, right: nn.Module) -> bool:
    """Return whether two modules whose names are of call variants are one submodule of the model:
    of one class, and with the same tensors if any. A graph may lack tensors that its call does not
    use.
    """
    if left is right:
        return True
    if not _may_have_one_class(left, right):
        return False
    left_tensors, right_tensors = _tensors(left), _tensors(right)
    common = left_tensors.keys() & right_tensors.keys()
    if not common:
        has_class = _class_of(left) is not None or _class_of(right) is not None
        return not left_tensors and not right_tensors and has_class
    return all(left_tensors[name] == right_tensors[name] for name in common)


def _may_have_one_class(left: nn.Module, right: nn.Module) -> bool:
    """Return whether the submodules had one class in the model, as far as torch kept its name."""
    left_class, right_class = _class_of(left), _class_of(right)
    return left_class is None or right_class is None or left_class == right_class


def _class_of(module: nn.Module) -> str | None:
    """Return the class that the submodule had in the model, if torch kept its name."""
    name = getattr(module, "_ty", None)
    return name if isinstance(name, str) else None


def _tensors(module: nn.Module) -> Mapping[str, Token]:
    """Return the tensors of its state dict; of non-persistent buffers a shared module has one copy
    for each path.
    """
    body = next(iter(_call_modules(module)), module)
    state = body.state_dict(keep_vars=True).items()
    return {name: token(tensor) for name, tensor in state if isinstance(tensor, torch.Tensor)}


# Whether the new value fits


def _fitted(old: object, new: object, fqn: str, kind: type) -> object:
    """Return `new` as a replacement of `old`, or if that is None, of an object of `kind`."""
    if new is None or (old is None and isinstance(new, kind)):
        return new
    if old is None:
        raise Refused(
            f"{fqn} is a {kind.__name__} or None, the new value {a(new)}",
            hint=f"give it a {kind.__name__}",
        )
    if not isinstance(old, torch.Tensor):
        if type(new) is not type(old):
            raise Refused(
                f"{fqn} is {a(old)}, the new value {a(new)}", hint="give it the same type"
            )
        return new
    if not isinstance(new, torch.Tensor):
        raise Refused(f"{fqn} is a tensor, the new value {a(new)}", hint="give it a tensor")
    for what, before, after in (
        ("shape", list(old.shape), list(new.shape)),
        ("dtype", old.dtype, new.dtype),
        ("device", old.device, new.device),
    ):
        if before != after:
            raise Refused(
                f"{fqn} has the {what} {before}, the new value {after}",
                hint="the program's graphs were specialised to it: export the changed model again",
            )
    if isinstance(old, nn.Parameter) and not isinstance(new, nn.Parameter):
        return nn.Parameter(new.detach(), old.requires_grad)
    return new
