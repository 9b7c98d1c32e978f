"""Swap the weights of a live model, planned and refused as by the command."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, Protocol, Union

import torch
from torch import nn
from torch.export import ExportedProgram

from ckpttool.containers.program import CONSTANTS
from ckpttool.core.checkpoint import Checkpoint, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import LOADED, Expression, Ref
from ckpttool.core.tables import by_key
from ckpttool.core.text import a, first_line, plural
from ckpttool.core.values import dataclass, public
from ckpttool.evaluate import torch_eval
from ckpttool.evaluate.torch_eval import evaluate, same_bits
from ckpttool.io.syscalls import uninterrupted
from ckpttool.live.model import (
    LiveTarget,
    Model,
    at_rest,
    check_replaceable,
    local_part,
    model_in,
    module_target,
    package_target,
    program_target,
    section_of,
    sharded_like,
)
from ckpttool.operands.model import ModelOperand
from ckpttool.swap.misfit import HINTS, Advice, Misfit
from ckpttool.swap.options import SwapOptions
from ckpttool.swap.result import ComparedConstant
from ckpttool.swap.swap import swap
from ckpttool.tracing.instances import layout_of
from ckpttool.tracing.memory import Token, address, geometry, token


class Package(Protocol):
    """A compiled package from `torch._inductor.aoti_load_package`."""

    def load_constants(
        self, constants_map: dict[str, torch.Tensor], *, check_full_update: bool
    ) -> None:
        """Take new constants."""


Swappable = Union[nn.Module, ExportedProgram, Package]

_HINTS: dict[Advice, str] = {
    "cast": "cast=True converts them to the dtypes that are there",
    "code": "a list of names cannot compute them, the model's code can: model=module, or a"
    " function that builds it",
    "constants": "constants=True swaps the constants among them too",
    "values": "constants=True takes the model's values, keep_constants=True keeps the program's",
    "no_values": "constants=True takes them from the model's code: add model=module, or a function"
    " that builds it; without constants=True the program keeps its own",
    "model": "state_dict hooks may rename keys when a model is saved: pass the model, as in"
    " model=module",
    "adapter": HINTS["adapter"],
    "quantized": HINTS["quantized"],
    "left_over": "everything that is there gets a value: leave the other keys out, which loses"
    " their effect on the model's output",
}

_COMPILED_IN = (
    "a weight of 8 elements or fewer in a row is compiled into a package's code: leave"
    " it out to keep it"
)


@public
@dataclass(frozen=True, slots=True)
class Swapped:
    """The result of a swap into a module or program in memory.

    Attributes:
        sources: FQN -> expression over the keys of the state dict.
        form: The form of the keys.
        ignored: Entries of the state dict that no module holds as a tensor.
        constants: The program's constants that are unchanged.
        by_code: FQNs whose values the model's own loading computed.
        compared: How each constant of a program compares with the model's.
    """

    sources: Mapping[str, Expression]
    form: str
    ignored: tuple[str, ...]
    constants: tuple[str, ...]
    by_code: tuple[str, ...]
    compared: tuple[ComparedConstant, ...] = ()


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
    """Put the weights of `state_dict` into a module, an `ExportedProgram` or a loaded AOTInductor
    package.

    `model` says how the keys relate to the target's names (a ``file.py:build`` operand, a names
    file, `Names`, a module, a program, a factory); without it the keys must be the target's names,
    except for segments of wrappers. `cast` allows other dtypes. `in_place` writes into the existing
    tensors, so that optimizers, other modules and views keep them: the default for a module.
    Otherwise new tensors replace them one by one (for a program: in one step, the default there,
    since it may still share its tensors with the exported model).

    A program's constants stay, and are compared with the model's, if `model` is code. If they
    differ, `constants` takes the values of `state_dict` or else of the model, `keep_constants`
    keeps the program's.

    Raises `Refused`, with all problems at once, if a weight is missing, unexpected, of another
    shape or dtype, or tied and different, if a constant differs and neither option decides, or if a
    tensor cannot take its new value. If anything is raised, the target is unchanged; Ctrl-C waits
    while it is written in place.
    """
    if constants and keep_constants:
        raise CkptError("constants and keep_constants exclude each other", hint="choose one")
    if not isinstance(state_dict, Mapping):
        raise CkptError(f"{a(state_dict)} is not a state_dict", hint="pass model.state_dict()")
    state = model_in(state_dict)

    options = SwapOptions(cast=cast, constants=constants, keep_constants=keep_constants)

    def make_plan(goal: LiveTarget) -> _SwapPlan:
        return _plan_swap(goal, state, model, options)

    if isinstance(target, nn.Module):
        return _swap_in_module(target, make_plan, in_place is not False)
    if isinstance(target, ExportedProgram):
        return _swap_in_program(target, make_plan, bool(in_place))
    if hasattr(target, "load_constants"):
        return _swap_in_package(target, make_plan, model)
    raise CkptError(
        f"{a(target)} holds no weights that can be swapped",
        hint="pass an nn.Module, an ExportedProgram or what torch._inductor.aoti_load_package"
        " gives",
    )


def _swap_in_module(module: nn.Module, make_plan: Planner, in_place: bool) -> Swapped:
    if not in_place:
        check_replaceable(module)
    with at_rest(module):
        target = module_target(module)
        plan = make_plan(target)
        replacements = stage(plan.new_in(target), plan.sources, plan.state)
        if in_place:
            check_in_place(replacements)
            _write(replacements)
        else:
            _put(_replacements(replacements), module)
    return plan.result


def _swap_in_program(program: ExportedProgram, make_plan: Planner, in_place: bool) -> Swapped:
    target = program_target(program)
    plan = make_plan(target)
    replacements = stage(plan.new_in(target), plan.sources, plan.state)
    if in_place:
        check_in_place(replacements)
        _write(replacements)
        return plan.result
    fresh = _replacements(replacements)
    program._state_dict = {
        fqn: fresh.get(id(tensor), tensor) for fqn, tensor in program.state_dict.items()
    }
    program._constants = {
        name: fresh.get(id(value), value) for name, value in program.constants.items()
    }
    return plan.result


def _swap_in_package(package: Any, make_plan: Planner, model: Model | None) -> Swapped:
    # Before 2.7 its `load_constants` frees memory that is not its own, and the process aborts.
    # The version is a `TorchVersion`, which compares numbers and not text.
    if torch.__version__ < "2.7":
        raise CkptError(
            f"torch {torch.__version__} cannot swap weights in a package",
            hint="pip install 'torch>=2.7'",
        )
    target = package_target(package, model)
    try:
        plan = make_plan(target)
    except Refused as error:
        if all(problem.kind != "left_over" for problem in error.problems):
            raise
        raise Refused(
            error.message, hint=f"{error.hint}; {_COMPILED_IN}", problems=error.problems
        ) from None
    values = {}
    for fqn, old in plan.new_in(target).items():
        values[fqn] = with_layout_of(plan.sources[fqn], old, plan.state)
    package.load_constants(values, check_full_update=False)
    return plan.result


@dataclass(frozen=True, slots=True, eq=False)
class _SwapPlan:
    """A checked swap: the `sources` of `result`, but with tensors in `state` for what the model's
    code computed.
    """

    result: Swapped
    sources: Mapping[str, Expression]
    state: Mapping[str, object]

    def new_in(self, target: LiveTarget) -> dict[str, torch.Tensor]:
        """Return the tensors of the target that get new values."""
        every: dict[str, Any] = {**target.tensors, **target.constants}
        return {fqn: old for fqn, old in every.items() if fqn in self.sources}


Planner = Callable[[LiveTarget], _SwapPlan]


def _plan_swap(
    target: LiveTarget, state: Mapping[str, object], model: Model | None, options: SwapOptions
) -> _SwapPlan:
    """Plan and refuse as the command does, on an index of what is in memory."""
    sections = (
        section_of(target.tensors),
        replace(section_of(target.constants), path=CONSTANTS, kind="other"),
    )
    program = Checkpoint(target.title, "memory", 0, sections)
    operand = model if model is None or isinstance(model, ModelOperand) else ModelOperand(model)
    try:
        result = swap(
            program,
            section_of(state),
            operand,
            options,
            remade=target.loads_constants,
            compare=target.compares_constants,
        )
    except Misfit as error:
        hint = _HINTS.get(error.advice, "compare the keys of the two")
        raise Refused(error.message, hint=hint, problems=error.problems) from None
    entries: dict[str, TensorEntry] = {}
    for section in result.program.sections:
        entries.update(by_key(section.tensors))
    from_model = [constant.name for constant in result.compared if constant.verdict == "from_model"]
    sources, values = dict(result.sources), dict(state)
    for fqn in (*result.by_code, *from_model):
        key = f"{LOADED}({fqn})"
        sources[fqn] = Ref(key)
        values[key] = torch_eval.load(entries[fqn])
    replaced = {*result.sources, *from_model}
    kept = tuple(fqn for fqn in target.constants if fqn not in replaced)
    swapped = Swapped(
        result.sources, result.form, result.ignored, kept, result.by_code, result.compared
    )
    return _SwapPlan(swapped, sources, values)


# Writing


def _write(replacements: Sequence[Replacement]) -> None:
    """Give every old tensor its new value; every reference to it stays valid, and sees the new
    value.

    Tensor objects are swapped first, which torch may refuse (then the first ones are swapped back).
    The memory of all others is written last, in one call, in which nothing is left to go wrong;
    Ctrl-C waits for its end.
    """
    olds, values = [], []
    for new in replacements:
        if new.memory is not None:
            old, value = new.memory
            # No call that takes many tensors writes through a lazy conjugation or negation.
            if old.is_conj():
                old, value = old.conj(), value.conj()
            if old.is_neg():
                old, value = torch._neg_view(old), torch._neg_view(value)
            olds.append(old)
            values.append(value)
    swapped: list[Replacement] = []
    with uninterrupted():
        try:
            for new in replacements:
                if new.memory is None:
                    grad, trains = new.old.grad, new.old.requires_grad  # these stay with the name
                    torch.utils.swap_tensors(new.old, new.value)
                    swapped.append(new)
                    new.old.requires_grad_(trains)
                    if grad is not None:
                        new.old.grad = grad
            if olds:
                with torch.no_grad():
                    torch._foreach_copy_(olds, values)
        except BaseException as error:
            for new in reversed(swapped):
                torch.utils.swap_tensors(new.old, new.value)
            if isinstance(error, RuntimeError):
                raise Refused(
                    f"a tensor cannot be swapped: {str(error).splitlines()[0]}",
                    hint="nothing was changed; in_place=False puts new tensors into the module"
                    " instead",
                ) from error
            raise


def _replacements(replacements: Sequence[Replacement]) -> dict[int, torch.Tensor]:
    """Return the replacement for each old tensor, by its id: of its class, strides, attributes and
    `requires_grad`, without a gradient, and in new memory that is shared if the old tensors share
    theirs.
    """
    fresh: dict[int, torch.Tensor] = {}
    by_memory: defaultdict[tuple[str, int], list[Replacement]] = defaultdict(list)
    for new in replacements:
        if new.way != "copy":
            fresh[id(new.old)] = new.value
            continue
        # of empty tensors, which have no memory, each is alone
        memory = ("address", address(new.old)) if new.old.numel() else ("object", id(new.old))
        by_memory[memory].append(new)
    with torch.no_grad():
        for group in by_memory.values():
            for new, value in zip(group, _in_new_memory(group)):
                fresh[id(new.old)] = _as_class_of(new.old, value)
    return fresh


def _in_new_memory(group: list[Replacement]) -> Sequence[torch.Tensor]:
    """Return the new values of tensors that share memory, in other memory that they share."""
    if len({token(new.old) for new in group}) > 1:
        return in_shared_memory(group)
    first = group[0]
    value = first.value
    if not first.is_own or value.stride() != first.old.stride():
        value = torch.empty_like(first.old, requires_grad=False).copy_(value)
    return [value.detach() for _ in group]


def _as_class_of(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the value as a tensor of the old one's class with its attributes, so that hooks and
    attributes of the old tensor stay.
    """
    tensor: torch.Tensor = torch.Tensor._make_subclass(type(old), value, old.requires_grad)
    tensor.__dict__.update(old.__dict__)
    return tensor


def _put(fresh: Mapping[int, torch.Tensor], module: nn.Module) -> None:
    """Put new tensors (by id of the old one) wherever `module` holds the old ones, each in one
    assignment.
    """
    places = []
    for table in _tables(module, set()):
        items = list(table.items() if isinstance(table, dict) else enumerate(table))
        for at, old in items:
            if id(old) in fresh:
                places.append((table, at, old))
    try:
        for table, at, old in places:
            table[at] = fresh[id(old)]
    except BaseException:
        for table, at, old in places:
            if table[at] is not old:
                table[at] = old
        raise


def _tables(module: nn.Module, seen: set[int]) -> Iterator[Any]:
    """Yield every dict and list in which a module may hold tensors: also for modules that it keeps
    as attributes, such as the calls behind a dispatcher of an unflattened program, and the flat
    weights of an RNN.
    """
    if id(module) in seen:
        return
    seen.add(id(module))
    yield module._parameters
    yield module._buffers
    yield module.__dict__
    lists = [value for value in module.__dict__.values() if isinstance(value, list)]
    yield from lists
    attributes = (*module._modules.values(), *module.__dict__.values())
    for value in (*attributes, *chain.from_iterable(lists)):
        if isinstance(value, nn.Module):
            yield from _tables(value, seen)


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """The value for one tensor of the target, and the way in which a swap in place puts it there:
    its elements are copied into the old tensor's memory (``copy``), this rank's part of a DTensor
    is (``copy_local``), or the two tensor objects are swapped (``swap_object``). `is_own`: nothing
    else uses the memory of `value`.
    """

    fqn: str
    old: torch.Tensor
    value: torch.Tensor
    way: Literal["copy", "copy_local", "swap_object"]
    is_own: bool = False

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The memory to write, and its new value; None for swapped objects."""
        if self.way == "copy":
            return self.old, self.value
        old, value = local_part(self.old), local_part(self.value)
        return None if old is None or value is None else (old, value)


def stage(
    tensors: Mapping[str, torch.Tensor], sources: Mapping[str, Expression], state: Mapping[str, Any]
) -> list[Replacement]:
    """Return a new value for every tensor object, of its dtype and shape and on its device.

    It may be a tensor of `state` itself, unless that is in memory that will be written. Raises
    `Refused`, with all problems at once, if a value cannot be computed, or if one tensor gets two.
    """
    blocks = _blocks(tensors.values())
    problems: list[Problem] = []
    replacements: dict[int, Replacement] = {}
    for fqn, old in tensors.items():
        if id(old) in replacements:
            continue  # planning has compared the values for the names of one tensor
        try:
            replacements[id(old)] = _new(fqn, old, _value(sources[fqn], state), blocks)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, CkptError) as error:
            problems.append(Problem(_reason(error), fqn))
    problems += _overlaps(list(replacements.values()))
    if problems:
        raise Refused(
            f"the weights do not fit: {plural(len(problems), 'problem')}",
            hint="nothing was changed; fix the problems listed above",
            problems=problems,
        )
    return list(replacements.values())


def _blocks(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the memory that will be written, by address: numpy may give one byte to several
    storages. Sorted and disjoint.
    """
    extents = set()
    for tensor in tensors:
        memory = tensor if layout_of(tensor) == "strided" else local_part(tensor)
        if memory is not None:
            extents.add(_extent(memory))
    blocks: list[tuple[int, int]] = []
    for begin, end in sorted(extents):
        if blocks and begin < blocks[-1][1]:
            blocks[-1] = blocks[-1][0], max(end, blocks[-1][1])
        else:
            blocks.append((begin, end))
    return blocks


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the one behind its last."""
    geom, begin = geometry(tensor), tensor.data_ptr()
    return begin, begin + (geom.end - geom.offset) * tensor.element_size()


def _value(source: Expression, state: Mapping[str, Any]) -> torch.Tensor:
    value = state[source.key] if isinstance(source, Ref) else evaluate(source, state.__getitem__)
    return value.detach()


def _new(
    fqn: str, old: torch.Tensor, value: torch.Tensor, blocks: Sequence[tuple[int, int]]
) -> Replacement:
    if "meta" in (old.device.type, value.device.type):
        which = "it" if old.device.type == "meta" else "its new value"
        raise CkptError(
            f"{which} is on the meta device and has no data", hint="materialize it first"
        )
    if layout_of(old) != "strided" or layout_of(value) != "strided":
        loaded = _loaded(old, sharded_like(value, old))
        has_local_parts = local_part(old) is not None and local_part(loaded) is not None
        return Replacement(fqn, old, loaded, "copy_local" if has_local_parts else "swap_object")
    fitted = value.to(device=old.device, dtype=old.dtype)
    will_be_written = _overlaps_block(fitted, blocks) and token(fitted) != token(old)
    is_own = will_be_written or fitted is not value
    return Replacement(fqn, old, fitted.clone() if will_be_written else fitted, "copy", is_own)


def _overlaps_block(tensor: torch.Tensor, blocks: Sequence[tuple[int, int]]) -> bool:
    """Return True if the tensor shares a byte with one of the `blocks`, which are sorted and
    disjoint.
    """
    begin, end = _extent(tensor)
    before_end = bisect_left(blocks, (end,))  # blocks that begin before the tensor ends
    return before_end > 0 and blocks[before_end - 1][1] > begin


def _loaded(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the result of loading `value` into a copy of `old`, by the tensors' own
    `module_load`.
    """
    trial = old.detach().clone()
    result: torch.Tensor = trial.module_load(value, assign=False)
    if result is value:
        result = value.clone()
    for what in ("shape", "dtype", "device"):
        if getattr(result, what) != getattr(old, what):
            raise CkptError(
                f"its module_load gives the {what} {getattr(result, what)}", hint="it must keep it"
            )
    if isinstance(old, nn.Parameter):
        result = nn.Parameter(result, old.requires_grad)
    result.__dict__.update(
        {name: value for name, value in old.__dict__.items() if name not in result.__dict__}
    )
    return result


def _overlaps(replacements: list[Replacement]) -> list[Problem]:
    """Return tensors that share memory and get different values for it, tried on a copy of the
    memory.
    """
    by_memory: defaultdict[int, list[Replacement]] = defaultdict(list)
    for new in replacements:
        if new.way == "copy" and new.old.numel():
            by_memory[address(new.old)].append(new)
    problems = []
    for group in by_memory.values():
        # Planning knows names of one storage, but not two storages that numpy has given the same
        # memory.
        first: dict[Token, Replacement] = {}
        for new in group:
            other = first.setdefault(token(new.old), new)
            if not same_bits(other.value, new.value):
                problems.append(Problem(f"tied to {other.fqn}, but its new value differs", new.fqn))
        distinct = list(first.values())
        if len(distinct) < 2:
            continue
        try:
            views = in_shared_memory(distinct)
        except RuntimeError as error:  # one of them is expanded
            problems += [Problem(_reason(error), new.fqn) for new in distinct]
            continue
        for new, view in zip(distinct, views):
            if not same_bits(view, new.value):
                problems.append(
                    Problem("shares memory with another weight that gets another value", new.fqn)
                )
    return problems


def in_shared_memory(group: list[Replacement]) -> list[torch.Tensor]:
    """Return tensors with the new values in new memory, which they share as the old ones do."""
    storage = max(
        (new.old.untyped_storage() for new in group), key=torch.UntypedStorage.nbytes
    ).clone()
    views = []
    for new in group:
        old = new.old
        view = torch.empty(0, dtype=old.dtype, device=old.device)
        view.set_(storage, old.storage_offset(), old.shape, old.stride())
        view = view.conj() if old.is_conj() else view
        views.append(torch._neg_view(view) if old.is_neg() else view)
    for view, new in zip(views, group):
        view.copy_(new.value)
    return views


def check_in_place(replacements: Sequence[Replacement]) -> None:
    """Raise `Refused`, with all problems at once, if a tensor's memory or object cannot take its
    new value.
    """
    problems = []
    places = []
    for new in replacements:
        if new.memory is None:
            if weakref.getweakrefs(new.old):
                problems.append(Problem("a weak reference to it would see the swap", new.fqn))
            continue
        old = new.memory[0]
        places.append((*_extent(old), address(old), new.fqn))
        if old.is_inference() and not torch.is_inference_mode_enabled():
            problems.append(Problem("an inference tensor", new.fqn))
        elif geometry(old).overlaps_itself:
            problems.append(Problem("several of its elements are one in memory", new.fqn))
    last, storage = 0, 0
    for begin, end, place, fqn in sorted(places):
        if begin < last and place != storage:
            problems.append(
                Problem("shares memory with another weight, which has another storage", fqn)
            )
        if end > last:
            last, storage = end, place
    if problems:
        raise Refused(
            f"{plural(len(problems), 'tensor')} cannot be changed in place",
            hint="in_place=False puts new tensors into the module instead",
            problems=problems,
        )


def with_layout_of(
    source: Expression, like: torch.Tensor, state: Mapping[str, Any]
) -> torch.Tensor:
    """Return the value in new memory with the strides and dtype of `like`, on its device if that
    has data.
    """
    value = _value(source, state)
    device = value.device if like.device.type == "meta" else like.device
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device).copy_(
        value
    )


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, CkptError) else first_line(error)
