"""Swap the weights of a live model, planned and refused as by the command."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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


class Package(Protocol):
    """A compiled package from `torch._inductor.aoti_load_package`."""

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
    """The result of a swap. `sources`: FQN -> expression over the state dict's keys; `constants` are unchanged.

    `form` is the form of the keys; `ignored` are entries that no module holds as a tensor. `by_code` are the FQNs that
    were computed by running the model's own loading, as by the command. `compared` says for each constant of a program
    how it compares with the model's.
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
    """Put the weights of `state_dict` into a module, an `ExportedProgram` or a loaded AOTInductor package.

    `model` says how the keys relate to the target's names (a ``file.py:build`` operand, a names file, `Names`, a
    module, a program, a factory); without it the keys must be the target's names, except for segments of wrappers.
    `cast` allows other dtypes. `in_place` writes into the existing tensors, so that optimizers, other modules and views
    keep them: the default for a module. Otherwise new tensors replace them one by one (for a program: in one step, the
    default there, since it may still share its tensors with the exported model).

    A program's constants stay, and are compared with the model's, if `model` is code. If they differ, `constants`
    takes the values of `state_dict` or else of the model, `keep_constants` keeps the program's.

    Raises `Refused`, with all problems at once, if a weight is missing, unexpected, of another shape or dtype, or tied
    and different, if a constant differs and neither option decides, or if a tensor cannot take its new value. If
    anything is raised, the target is unchanged; Ctrl-C waits while it is written in place.
    """
    if constants and keep_constants:
        raise CkptError("constants and keep_constants exclude each other", hint="choose one")
    if not isinstance(state_dict, Mapping):
        raise CkptError(f"{a(state_dict)} is not a state_dict", hint="pass model.state_dict()")
    state = model_in(state_dict)

    def planned(goal: Target) -> _Plan:
        return _planned(goal, state, model, cast=cast, constants=constants, keep_constants=keep_constants)

    if isinstance(target, nn.Module):
        if in_place is False:
            check_replaceable(target)
        with at_rest(target):
            goal = module_target(target)
            plan = planned(goal)
            news = stage(plan.new_in(goal), plan.sources, plan.state)
            if in_place is False:
                _put(_replacements(news), target)
            else:
                check_in_place(news)
                _write(news)
    elif isinstance(target, ExportedProgram):
        goal = program_target(target)
        plan = planned(goal)
        news = stage(plan.new_in(goal), plan.sources, plan.state)
        if in_place:
            check_in_place(news)
            _write(news)
        else:
            fresh = _replacements(news)
            target._state_dict = {fqn: fresh.get(id(tensor), tensor) for fqn, tensor in target.state_dict.items()}
            target._constants = {name: fresh.get(id(value), value) for name, value in target.constants.items()}
    elif hasattr(target, "load_constants"):
        if torch.__version__ < "2.7":  # its `load_constants` frees memory that is not its own, and the process aborts
            raise CkptError(
                f"torch {torch.__version__} cannot swap weights in a package", hint="pip install 'torch>=2.7'"
            )
        goal = package_target(target, model)
        try:
            plan = planned(goal)
        except Refused as error:
            raise Refused(error.message, hint=f"{error.hint}; {_COMPILED_IN}", problems=error.problems) from None
        likes = plan.new_in(goal)
        values = {fqn: laid_out(plan.sources[fqn], like, plan.state) for fqn, like in likes.items()}
        target.load_constants(values, check_full_update=False)
    else:
        raise CkptError(
            f"{a(target)} holds no weights that can be swapped",
            hint="pass an nn.Module, an ExportedProgram or what torch._inductor.aoti_load_package gives",
        )
    return plan.result


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """A checked swap: the `sources` of `result`, but with tensors in `state` for what the model's code computed."""

    result: Swapped
    sources: Mapping[str, Expression]
    state: Mapping[str, object]

    def new_in(self, target: Target) -> dict[str, torch.Tensor]:
        """Return the tensors of the target that get new values."""
        every: dict[str, Any] = {**target.tensors, **target.constants}
        return {fqn: old for fqn, old in every.items() if fqn in self.sources}


def _planned(
    target: Target,
    state: Mapping[str, object],
    model: Model | None,
    *,
    cast: bool,
    constants: bool,
    keep_constants: bool,
) -> _Plan:
    """Plan and refuse as the command does, on an index of what is in memory."""
    sections = section_of(target.tensors), replace(section_of(target.constants), path=CONSTANTS, kind="other")
    program = Checkpoint(target.title, "memory", 0, sections)
    operand = None if model is None else ModelOperand(model)
    try:
        result = swap(
            program,
            section_of(state),
            None if operand is None else operand.names(),
            packed=True,
            remade=target.remade,
            compare=target.compared,
            code=operand if operand is not None and operand.is_definition else None,
            cast=cast,
            constants=constants,
            keep_constants=keep_constants,
        )
    except Misfit as error:
        hint = _HINTS.get(error.advice, "compare the keys of the two")
        raise Refused(error.message, hint=hint, problems=error.problems) from None
    entries = {entry.key: entry for section in result.program.sections for entry in section.tensors}
    from_model = [constant.name for constant in result.compared if constant.verdict == "from_model"]
    computed = {fqn: Ref(f"{LOADED}({fqn})") for fqn in (*result.by_code, *from_model)}
    values = {ref.key: torch_eval.load(entries[fqn]) for fqn, ref in computed.items()}
    kept = tuple(fqn for fqn in target.constants if fqn not in result.sources and fqn not in from_model)
    swapped = Swapped(result.sources, result.form, result.ignored, kept, result.by_code, result.compared)
    return _Plan(swapped, {**result.sources, **computed}, {**state, **values})


# Writing


def _write(news: Sequence[New]) -> None:
    """Give every old tensor its new value; every reference to it stays valid, and sees the new value.

    Tensor objects are swapped first, which torch may refuse (then the first ones are swapped back). The memory of all
    others is written last, in one call, in which nothing is left to go wrong; Ctrl-C waits for its end.
    """
    pairs = []
    for new in news:
        if new.memory is not None:
            old, value = new.memory
            # No call that takes many tensors writes through a lazy conjugation or negation.
            old, value = (old.conj(), value.conj()) if old.is_conj() else (old, value)
            pairs.append((torch._neg_view(old), torch._neg_view(value)) if old.is_neg() else (old, value))
    done: list[New] = []
    with uninterrupted():
        try:
            for new in news:
                if new.memory is None:
                    grad, trains = new.old.grad, new.old.requires_grad  # these stay with the name
                    torch.utils.swap_tensors(new.old, new.value)
                    done.append(new)
                    new.old.requires_grad_(trains)
                    if grad is not None:
                        new.old.grad = grad
            if pairs:
                with torch.no_grad():
                    torch._foreach_copy_([old for old, _ in pairs], [value for _, value in pairs])
        except BaseException as error:
            for new in reversed(done):
                torch.utils.swap_tensors(new.old, new.value)
            if isinstance(error, RuntimeError):
                raise Refused(
                    f"a tensor cannot be swapped: {str(error).splitlines()[0]}",
                    hint="nothing was changed; in_place=False puts new tensors into the module instead",
                ) from error
            raise


def _replacements(news: Sequence[New]) -> dict[int, torch.Tensor]:
    """Return the replacement for each old tensor, by its id: of its class, strides, attributes and `requires_grad`,
    without a gradient, and in new memory that is shared if the old tensors share theirs."""
    fresh = {id(new.old): new.value for new in news if new.whole}
    groups: defaultdict[int, list[New]] = defaultdict(list)
    for new in news:
        if not new.whole:
            groups[address(new.old) if new.old.numel() else id(new.old)].append(new)
    with torch.no_grad():
        for group in groups.values():
            if len({token(new.old) for new in group}) > 1:
                values = arranged(group)
            else:
                old, value = group[0].old, group[0].value
                if not group[0].is_own or value.stride() != old.stride():
                    value = torch.empty_like(old, requires_grad=False).copy_(value).detach()
                values = [value.detach() for _ in group]
            for new, value in zip(group, values):
                old = new.old
                # The class of `old` adds no behavior to a plain tensor.
                tensor: torch.Tensor = torch.Tensor._make_subclass(type(old), value, old.requires_grad)
                tensor.__dict__.update(old.__dict__)
                fresh[id(old)] = tensor
    return fresh


def _put(fresh: Mapping[int, torch.Tensor], module: nn.Module) -> None:
    """Put new tensors (by id of the old one) wherever `module` holds the old ones, each in one assignment."""
    places = []
    for table in _tables(module, set()):
        items = list(table.items() if isinstance(table, dict) else enumerate(table))
        places += [(table, at, old) for at, old in items if id(old) in fresh]
    try:
        for table, at, old in places:
            table[at] = fresh[id(old)]
    except BaseException:
        for table, at, old in places:
            if table[at] is not old:
                table[at] = old
        raise


def _tables(module: nn.Module, seen: set[int]) -> Iterator[Any]:
    """Yield every dict and list in which a module may hold tensors: also for modules that it keeps as attributes,
    such as the calls behind a dispatcher of an unflattened program, and the flat weights of an RNN."""
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
