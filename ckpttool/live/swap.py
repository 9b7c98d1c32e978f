"""New weights for what is already in memory: planned and refused as by the command, staged, then put in all at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, Union

import torch
from torch import nn
from torch.export import ExportedProgram

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits.swap.swap import Advice, Misfit, swap
from ckpttool.errors import CkptError, Refused
from ckpttool.evaluate import with_torch
from ckpttool.expression import LOADED, Expression, Ref
from ckpttool.formats.pt2.program import CONSTANTS
from ckpttool.live.model import Model, Target, module_target, package_target, program_target
from ckpttool.live.saved import model_in
from ckpttool.live.section import section_of
from ckpttool.live.sharded import at_rest, check_replaceable
from ckpttool.live.stage import check_in_place, laid_out, stage
from ckpttool.live.tensors import put, replacements, write
from ckpttool.operands.model import ModelOperand
from ckpttool.values import dataclass, public
from ckpttool.words import a


class Package(Protocol):
    """A compiled package that `torch._inductor.aoti_load_package` gave."""

    def load_constants(self, constants_map: dict[str, torch.Tensor], *, check_full_update: bool) -> None:
        """Take new constants."""


Swappable = Union[nn.Module, ExportedProgram, Package]

_HINTS: dict[Advice, str] = {
    "cast": "cast=True converts them to the dtypes that are there",
    "code": "a list of names cannot compute them, the model's code can: model=module, or a function that builds it",
    "constants": "export the program again: its constants are a part of it",
    "model": "state_dict hooks may rename keys when a model is saved: pass the model, as in model=module",
}

_COMPILED_IN = "a weight of 8 elements or fewer in a row is compiled into a package's code: leave it out to keep it"


@public
@dataclass(frozen=True, slots=True)
class Swapped:
    """What a swap did. `sources`: FQN -> expression over the state dict's keys; `constants` stayed as they were.

    `form` is the form that the keys were read in; `ignored` are entries that no module holds as a tensor. `by_code` are
    the FQNs that were computed by running the model's own loading, as by the command.
    """

    sources: Mapping[str, Expression]
    form: str
    ignored: tuple[str, ...]
    constants: tuple[str, ...]
    by_code: tuple[str, ...]


def swap_weights(
    target: Any,
    state_dict: Mapping[str, object],
    model: Model | None = None,
    *,
    cast: bool = False,
    in_place: bool | None = None,
) -> Swapped:
    """Puts the weights of `state_dict` into a module, an `ExportedProgram` or a loaded AOTInductor package.

    `model` says how the keys relate to the target's names (a ``file.py:build`` operand, a names file, `Names`, a
    module, a program, a factory); without it the keys must be the target's names, segments of wrappers aside. `cast`
    allows other dtypes. `in_place` writes into the tensors that are there, so that optimizers, other modules and views
    keep them: the default for a module. Otherwise new tensors take their place one by one (for a program: in one step,
    the default there, since its tensors may still be those of the model that it was exported from).

    Raises `Refused`, with all problems at once, where a weight is missing, left over, of another shape or dtype, or
    tied and different, and where a tensor cannot take it. Whatever is raised, the target is as it was; Ctrl-C waits
    while it is written in place.
    """
    if not isinstance(state_dict, Mapping):
        raise CkptError(f"{a(state_dict)} is no state dict", hint="pass model.state_dict()")
    state_dict = model_in(state_dict)
    if isinstance(target, nn.Module):
        return _into_module(target, state_dict, model, cast, in_place is not False)
    if isinstance(target, ExportedProgram):
        return _into_program(target, state_dict, model, cast, in_place is True)
    if hasattr(target, "load_constants"):
        return _into_package(target, state_dict, model, cast)
    raise CkptError(
        f"{a(target)} holds no weights that can be swapped",
        hint="pass an nn.Module, an ExportedProgram or what torch._inductor.aoti_load_package gives",
    )


def _into_module(
    module: nn.Module, state: Mapping[str, object], model: Model | None, cast: bool, in_place: bool
) -> Swapped:
    def take(fresh: Mapping[int, torch.Tensor]) -> None:
        put(fresh, module)

    if not in_place:
        check_replaceable(module)
    with at_rest(module):
        return _into_tensors(module_target(module), state, model, cast, None if in_place else take)


def _into_program(
    program: ExportedProgram, state: Mapping[str, object], model: Model | None, cast: bool, in_place: bool
) -> Swapped:
    def take(fresh: Mapping[int, torch.Tensor]) -> None:
        program._state_dict = {fqn: fresh.get(id(tensor), tensor) for fqn, tensor in program.state_dict.items()}

    return _into_tensors(program_target(program), state, model, cast, None if in_place else take)


def _into_tensors(
    target: Target,
    state: Mapping[str, object],
    model: Model | None,
    cast: bool,
    take: Callable[[dict[int, torch.Tensor]], None] | None,
) -> Swapped:
    """Writes into the tensors that are there, or where there is `take` has it put new ones (by id of the old) there."""
    plan = _planned(target, state, model, cast)
    news = stage(_taking(target, plan), plan.sources, plan.state)
    if take is None:
        check_in_place(news)
        write(news)
    else:
        take(replacements(news))
    return plan.done


def _into_package(package: Any, state: Mapping[str, object], model: Model | None, cast: bool) -> Swapped:
    if torch.__version__ < "2.7":  # its `load_constants` frees memory that is not its own, and the process aborts
        raise CkptError(f"torch {torch.__version__} cannot swap weights in a package", hint="pip install 'torch>=2.7'")
    target = package_target(package, model)
    try:
        plan = _planned(target, state, model, cast)
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


def _planned(target: Target, state: Mapping[str, object], model: Model | None, cast: bool) -> _Plan:
    """The plan and the refusals of the command, over an index of what is in memory."""
    sections = section_of(target.tensors), replace(section_of(target.constants), path=CONSTANTS, kind="other")
    have = Checkpoint(target.title, "memory", 0, sections)
    operand = None if model is None else ModelOperand(model)
    names = None if operand is None else operand.names()
    code = operand if operand is not None and operand.is_definition else None
    try:
        found = swap(have, section_of(state), names, cast=cast, packed=True, remade=target.remade, code=code)
    except Misfit as error:
        hint = _HINTS.get(error.advice, "compare the keys of the two")
        raise Refused(error.message, hint=hint, problems=error.problems) from None
    made = {entry.key: entry for section in found.program.sections for entry in section.tensors}
    by_code = {fqn: Ref(f"{LOADED}({fqn})") for fqn in found.by_code}
    values = {ref.key: with_torch.load(made[fqn]) for fqn, ref in by_code.items()}
    kept = tuple(fqn for fqn in target.constants if fqn not in found.sources)
    done = Swapped(found.sources, found.form, found.ignored, kept, found.by_code)
    return _Plan(done, {**found.sources, **by_code}, {**state, **values})
