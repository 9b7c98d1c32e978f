"""New weights for a live model: planned and refused as the command does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, Union

import torch
from torch import nn
from torch.export import ExportedProgram

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError, Refused
from ckpttool.core.expression import LOADED, Expression, Ref
from ckpttool.core.text import a
from ckpttool.core.values import dataclass, public
from ckpttool.evaluate import torch_eval
from ckpttool.formats.pt2.program import CONSTANTS
from ckpttool.io.interrupts import uninterrupted
from ckpttool.live.model import (
    Model,
    Target,
    at_rest,
    check_replaceable,
    model_in,
    module_target,
    package_target,
    program_target,
    section_of,
)
from ckpttool.live.stage import New, arranged, check_in_place, laid_out, stage
from ckpttool.operands.model import ModelOperand
from ckpttool.swap.swap import Advice, Constant, Misfit, swap
from ckpttool.tracing.recorder.memory import address, token


def write(news: Sequence[New]) -> None:
    """Gives every old tensor its new value; every reference to it stays valid, and sees the new value.

    Tensor objects are swapped first, which torch may refuse (then those before are swapped back); the memory of all
    others is written last, in one call, in which nothing is left to go wrong: Ctrl-C waits for its end.
    """
    plain = [_as_it_lies(*new.memory) for new in news if new.memory is not None]
    with uninterrupted():
        _write(news, plain)


def _as_it_lies(old: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two without a lazy conjugation or negation of `old`, through which no call writes that takes many tensors."""
    old, value = (old.conj(), value.conj()) if old.is_conj() else (old, value)
    return (torch._neg_view(old), torch._neg_view(value)) if old.is_neg() else (old, value)


def _write(news: Sequence[New], plain: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    done: list[New] = []
    try:
        for new in news:
            if new.memory is None:
                _swap(new, done)
        if plain:
            with torch.no_grad():
                torch._foreach_copy_([old for old, _ in plain], [value for _, value in plain])
    except BaseException as error:
        for new in reversed(done):
            torch.utils.swap_tensors(new.old, new.value)
        if isinstance(error, RuntimeError):
            raise Refused(
                f"a tensor cannot be swapped: {str(error).splitlines()[0]}",
                hint="nothing was changed; in_place=False puts new tensors into the module instead",
            ) from error
        raise


def _swap(new: New, done: list[New]) -> None:
    """Swaps two tensor objects; the gradient and `requires_grad` stay with the name."""
    grad, trains = new.old.grad, new.old.requires_grad
    torch.utils.swap_tensors(new.old, new.value)
    done.append(new)
    new.old.requires_grad_(trains)
    if grad is not None:
        new.old.grad = grad


def replacements(news: Sequence[New]) -> dict[int, torch.Tensor]:
    """id of an old tensor -> the tensor that takes its place: of its class, strides, attributes and `requires_grad`,
    without a gradient, and in memory of its own that is shared wherever the old ones share theirs."""
    made = {id(new.old): new.value for new in news if new.whole}
    groups: defaultdict[int, list[New]] = defaultdict(list)
    for new in news:
        if not new.whole:
            groups[address(new.old) if new.old.numel() else id(new.old)].append(new)
    with torch.no_grad():
        for group in groups.values():
            for new, fresh in zip(group, _fresh(group)):
                made[id(new.old)] = _as(new.old, fresh)
    return made


def _fresh(group: list[New]) -> list[torch.Tensor]:
    if len({token(new.old) for new in group}) > 1:
        return arranged(group)
    old, value = group[0].old, group[0].value
    fits = group[0].is_own and value.stride() == old.stride()
    one = value if fits else torch.empty_like(old, requires_grad=False).copy_(value).detach()
    return [one.detach() for _ in group]


def put(fresh: Mapping[int, torch.Tensor], module: nn.Module) -> None:
    """Puts new tensors (by id of the old one) wherever `module` holds the old ones, each in one assignment."""
    places = [(table, at, old) for table in _tables(module) for at, old in _items(table) if id(old) in fresh]
    try:
        for table, at, old in places:
            table[at] = fresh[id(old)]
    except BaseException:
        for table, at, old in places:
            if table[at] is not old:
                table[at] = old
        raise


def _items(table: Any) -> list[tuple[Any, Any]]:
    return list(table.items() if isinstance(table, dict) else enumerate(table))


def _tables(module: nn.Module, seen: set[int] | None = None) -> Iterator[Any]:
    """Every dict and list in which a module may hold tensors: also those of modules that it keeps as attributes, such
    as the calls behind a dispatcher of an unflattened program, and the flat weights of an RNN."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield module._parameters
    yield module._buffers
    yield module.__dict__
    lists = [value for value in module.__dict__.values() if isinstance(value, list)]
    yield from lists
    for value in (*module._modules.values(), *module.__dict__.values(), *(item for held in lists for item in held)):
        if isinstance(value, nn.Module):
            yield from _tables(value, seen)


def _as(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` as a tensor of the class of `old` (which adds no behaviour of its own), with its attributes."""
    made: torch.Tensor = torch.Tensor._make_subclass(type(old), value, old.requires_grad)
    made.__dict__.update(old.__dict__)
    return made


class Package(Protocol):
    """A compiled package that `torch._inductor.aoti_load_package` gave."""

    def load_constants(self, constants_map: dict[str, torch.Tensor], *, check_full_update: bool) -> None:
        """Take new constants."""


Swappable = Union[nn.Module, ExportedProgram, Package]

_HINTS: dict[Advice, str] = {
    "cast": "cast=True converts them to the dtypes that are there",
    "code": "a list of names cannot compute them, the model's code can: model=module, or a function that builds it",
    "constants": "constants=True swaps the constants among them too",
    "values": "constants=True takes the model's values, keep_constants=True keeps the program's",
    "model": "state_dict hooks may rename keys when a model is saved: pass the model, as in model=module",
}

_COMPILED_IN = "a weight of 8 elements or fewer in a row is compiled into a package's code: leave it out to keep it"


@public
@dataclass(frozen=True, slots=True)
class Swapped:
    """What a swap did. `sources`: FQN -> expression over the state dict's keys; `constants` stayed as they were.

    `form` is the form that the keys were read in; `ignored` are entries that no module holds as a tensor. `by_code` are
    the FQNs that were computed by running the model's own loading, as by the command. `compared` says of each constant
    of a program how it compares with the model's.
    """

    sources: Mapping[str, Expression]
    form: str
    ignored: tuple[str, ...]
    constants: tuple[str, ...]
    by_code: tuple[str, ...]
    compared: tuple[Constant, ...] = ()


def swap_weights(
    target: Any,
    state_dict: Mapping[str, object],
    model: Model | None = None,
    *,
    cast: bool = False,
    in_place: bool | None = None,
    constants: bool = False,
    keep_constants: bool = False,
) -> Swapped:
    """Puts the weights of `state_dict` into a module, an `ExportedProgram` or a loaded AOTInductor package.

    `model` says how the keys relate to the target's names (a ``file.py:build`` operand, a names file, `Names`, a
    module, a program, a factory); without it the keys must be the target's names, segments of wrappers aside. `cast`
    allows other dtypes. `in_place` writes into the tensors that are there, so that optimizers, other modules and views
    keep them: the default for a module. Otherwise new tensors take their place one by one (for a program: in one step,
    the default there, since its tensors may still be those of the model that it was exported from).

    A program's constants stay, and are compared with those of `model`, if that is code. If they differ, `constants`
    takes those of `state_dict` or else of the model, `keep_constants` keeps them.

    Raises `Refused`, with all problems at once, where a weight is missing, left over, of another shape or dtype, or
    tied and different, where a constant differs and neither option decides, and where a tensor cannot take it.
    Whatever is raised, the target is as it was; Ctrl-C waits while it is written in place.
    """
    if constants and keep_constants:
        raise CkptError("constants and keep_constants exclude each other", hint="choose one")
    if not isinstance(state_dict, Mapping):
        raise CkptError(f"{a(state_dict)} is not a state_dict", hint="pass model.state_dict()")
    wanted = _Wanted(model_in(state_dict), model, cast, constants, keep_constants)
    if isinstance(target, nn.Module):
        return _into_module(target, wanted, in_place is not False)
    if isinstance(target, ExportedProgram):
        return _into_program(target, wanted, in_place is True)
    if hasattr(target, "load_constants"):
        return _into_package(target, wanted)
    raise CkptError(
        f"{a(target)} holds no weights that can be swapped",
        hint="pass an nn.Module, an ExportedProgram or what torch._inductor.aoti_load_package gives",
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """What `swap_weights` is called with, beside the target."""

    state: Mapping[str, object]
    model: Model | None
    cast: bool
    constants: bool
    keep_constants: bool


def _into_module(module: nn.Module, wanted: _Wanted, in_place: bool) -> Swapped:
    def take(fresh: Mapping[int, torch.Tensor]) -> None:
        put(fresh, module)

    if not in_place:
        check_replaceable(module)
    with at_rest(module):
        return _into_tensors(module_target(module), wanted, None if in_place else take)


def _into_program(program: ExportedProgram, wanted: _Wanted, in_place: bool) -> Swapped:
    def take(fresh: Mapping[int, torch.Tensor]) -> None:
        program._state_dict = {fqn: fresh.get(id(tensor), tensor) for fqn, tensor in program.state_dict.items()}
        program._constants = {name: fresh.get(id(value), value) for name, value in program.constants.items()}

    return _into_tensors(program_target(program), wanted, None if in_place else take)


def _into_tensors(target: Target, wanted: _Wanted, take: Callable[[dict[int, torch.Tensor]], None] | None) -> Swapped:
    """Writes into the tensors that are there, or where there is `take` has it put new ones (by id of the old) there."""
    plan = _planned(target, wanted)
    news = stage(_taking(target, plan), plan.sources, plan.state)
    if take is None:
        check_in_place(news)
        write(news)
    else:
        take(replacements(news))
    return plan.done


def _into_package(package: Any, wanted: _Wanted) -> Swapped:
    if torch.__version__ < "2.7":  # its `load_constants` frees memory that is not its own, and the process aborts
        raise CkptError(f"torch {torch.__version__} cannot swap weights in a package", hint="pip install 'torch>=2.7'")
    target = package_target(package, wanted.model)
    try:
        plan = _planned(target, wanted)
    except Refused as error:
        raise Refused(error.message, hint=f"{error.hint}; {_COMPILED_IN}", problems=error.problems) from None
    constants = {fqn: laid_out(plan.sources[fqn], like, plan.state) for fqn, like in _taking(target, plan).items()}
    package.load_constants(constants, check_full_update=False)
    return plan.done


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What is to be done: `sources` as in `done`, but for what the model's own code computed: a tensor in `state`."""

    done: Swapped
    sources: Mapping[str, Expression]
    state: Mapping[str, object]


def _taking(target: Target, plan: _Plan) -> dict[str, torch.Tensor]:
    """The tensors that get new values."""
    every: dict[str, Any] = {**target.tensors, **target.constants}
    return {fqn: old for fqn, old in every.items() if fqn in plan.sources}


def _planned(target: Target, wanted: _Wanted) -> _Plan:
    """The plan and the refusals of the command, over an index of what is in memory."""
    sections = section_of(target.tensors), replace(section_of(target.constants), path=CONSTANTS, kind="other")
    have = Checkpoint(target.title, "memory", 0, sections)
    operand = None if wanted.model is None else ModelOperand(wanted.model)
    names = None if operand is None else operand.names()
    code = operand if operand is not None and operand.is_definition else None
    try:
        found = swap(
            have,
            section_of(wanted.state),
            names,
            cast=wanted.cast,
            packed=True,
            constants=wanted.constants,
            keep_constants=wanted.keep_constants,
            remade=target.remade,
            compare=target.compared,
            code=code,
        )
    except Misfit as error:
        hint = _HINTS.get(error.advice, "compare the keys of the two")
        raise Refused(error.message, hint=hint, problems=error.problems) from None
    made = {entry.key: entry for section in found.program.sections for entry in section.tensors}
    from_model = [one.name for one in found.compared if one.verdict == "from_model"]
    computed = {fqn: Ref(f"{LOADED}({fqn})") for fqn in (*found.by_code, *from_model)}
    values = {ref.key: torch_eval.load(made[fqn]) for fqn, ref in computed.items()}
    kept = tuple(fqn for fqn in target.constants if fqn not in found.sources and fqn not in from_model)
    done = Swapped(found.sources, found.form, found.ignored, kept, found.by_code, found.compared)
    return _Plan(done, {**found.sources, **computed}, {**wanted.state, **values})
