"""`load`: a checkpoint into a live model and its optimizer, all or nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.core.optimizer_state import PARAM_NAMES, PARAMS
from ckpttool.core.options import expand_options
from ckpttool.core.text import Info, a, listed, plural, some
from ckpttool.core.values import dataclass, public
from ckpttool.io import sources
from ckpttool.live.fitting import fitting_model, fitting_state
from ckpttool.live.model import FSDP1, FSDP2, innermost, instances
from ckpttool.live.partial import fitting_part
from ckpttool.live.put import put
from ckpttool.live.same_value import same_value
from ckpttool.operands.checkpoint import (
    Ckpt,
    model_section,
    open_checkpoint,
    open_operand,
    pick,
    split,
)
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.reading import read_for_model
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.planning import plan_remap
from ckpttool.tracing.build_model import CannotBuild
from ckpttool.tracing.optimizer_copy import like


@public
@dataclass(frozen=True, slots=True)
class HyperparameterChange:
    """A hyperparameter of a param group that loading changed.

    Attributes:
        group: The index of the param group.
        name: The hyperparameter, such as ``lr``.
        before: The value in the optimizer; None if it had none.
        after: The value from the checkpoint.
    """

    group: int
    name: str
    before: Any
    after: Any


@public
@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` did.

    A saved param group brings its hyperparameters, as in ``load_state_dict``; a group that no saved
    group equals keeps what the code sets.

    Attributes:
        ckpt: The checkpoint.
        section: The path of the state dict in the file; None if only the optimizer was loaded.
        tensors: The number of tensors of the model that got values.
        fix: The call or command of the remap that was applied; None if the keys fit as they were.
        optimizer: The path of the optimizer's state; None if it was not loaded.
        hyperparameters: The hyperparameters that loading changed.
        missing: With ``partial=True``, keys of the model that the file lacks. These tensors, and
            the mismatched ones, are unchanged.
        mismatched: With ``partial=True``, keys of the model that have another shape in the file.
        unexpected: With ``partial=True``, keys of the file that the model does not have.
        notes: How the checkpoint was read: which file of a folder, for example.
    """

    ckpt: str
    section: str | None
    tensors: int
    fix: str | None
    optimizer: str | None
    hyperparameters: tuple[HyperparameterChange, ...] = ()
    missing: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return what was loaded, renamed, changed and left out, a line each, with warnings."""
        parts = []
        if self.section is not None:
            section = f" ({self.section})" if self.section else ""
            parts.append(f"{plural(self.tensors, 'tensor')}{section}")
        if self.optimizer is not None:
            parts.append("the state of the optimizer")
        lines = [f"loaded from {self.ckpt}: {listed(parts)}"]
        if self.fix is not None:
            lines.append(f"its keys were renamed on the way, as {self.fix} does")
        for change in self.hyperparameters:
            where = f"param group {change.group}, {change.name}"
            lines.append(f"{where}: {change.after!r} instead of {change.before!r}")
        left_out = {
            f"missing from {self.ckpt}": self.missing,
            "of another shape": self.mismatched,
            "not in the model": self.unexpected,
        }
        for what, keys in left_out.items():
            if keys:
                lines.append(f"{plural(len(keys), 'key')} {what}: {some(keys)}")
        lines += [f"warning: {note}" for note in self.notes if not isinstance(note, Info)]
        return "\n".join(lines)


@expand_options()
def load(
    ckpt: Ckpt,
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    definition: Any = None,
    cast: bool = False,
    partial: bool = False,
    section: str | None = None,
    select: str | None = None,
) -> Loaded:
    """Load a checkpoint into a live model, and into its optimizer, whatever wrappers and containers
    are between them.

    Its keys may lack or have the segments of DDP, FSDP, `torch.compile` and Lightning, or be the
    names of an exported program: the remap that `diff` would suggest is applied, and only if a
    strict load succeeds after it. Nothing is inferred from shapes, and values that a load hook
    computes are refused. Optimizer state may be by ids or by names, in the order of this optimizer
    or another one; a file with an optimizer alone is loaded into `optimizer`. Values are written
    into the existing tensors. Those of local files are read through a memory map; remote ones are
    held in memory until all are there. Pickles are read and never run.

    Args:
        ckpt: Anything that `open_checkpoint` takes.
        model: The module. Every rank of a sharded module (`fully_shard`, FSDP1) calls `load`.
        optimizer: Its optimizer, if its state is loaded too.
        definition: The function, class or ``file.py:build`` operand that builds a sharded module
            before it is sharded.
        cast: Allow other dtypes.
        partial: Load what fits by name and shape; the result says what did not.
        section: The state dict of the file to load (``"ema"``).
        select: The submodule in it that `model` is (``"encoder"``).

    Returns:
        What was loaded, and the call that would write the same keys to a file.

    Raises:
        Refused: The checkpoint does not fit; all problems at once.
        CkptError: It cannot be read. If anything is raised, model and optimizer are unchanged.

    Example::

        loaded = ckpttool.load("train.pt", model, optimizer)
        print(loaded.fix)  # the call that would write the same keys to a file, or None
    """
    sources.begin_call()
    _check_live(model, optimizer)
    core = innermost(model)
    if definition is None and (instances(model, FSDP1) or instances(core, FSDP2)):
        raise CkptError(
            "a sharded module cannot be copied, and its state_dict hooks are not known",
            hint="pass definition=build, the function or class that builds the model before it is"
            " sharded",
        )
    if optimizer is not None and instances(model, FSDP1):
        raise CkptError(
            "the state of an optimizer under FSDP1 is cut like its flat parameters",
            hint="load the model alone, and the optimizer with torch:"
            " `ckpttool.remap(CKPT, 'named.pt', model=build, optimizer_keys='fqn')` on one rank,"
            " then on all `from torch.distributed.checkpoint.state_dict import StateDictOptions,"
            " set_optimizer_state_dict; set_optimizer_state_dict(model, optimizer,"
            " torch.load('named.pt')['optimizer'],"
            " options=StateDictOptions(full_state_dict=True))`",
        )
    operand = _operand_of(core if definition is None else definition)
    source = read_for_model(open_checkpoint(ckpt), operand)
    weights = _narrowed(source, ckpt, section, select)
    part, fix, state_dict, by_code = None, None, None, False
    if partial:
        part = fitting_part(model_section(weights), core, operand)
        weights = Checkpoint.of(part.section)
    if weights.state_dicts or optimizer is None:
        state_dict, fix, by_code = fitting_model(weights, operand, cast)
    path, state = None, None
    if optimizer is not None:
        path, state = fitting_state(source, operand.with_optimizer(like(optimizer, core)), cast)
    before = _hyperparameters(optimizer)
    count = put(model, state_dict, operand, optimizer, state, cast, by_code)
    loaded_path = section
    if section is None and state_dict is not None:
        loaded_path = model_section(source).path
    changes = _changes(before, _hyperparameters(optimizer))
    loaded = Loaded(source.source, loaded_path, count, fix, path, changes, notes=source.notes)
    if part is None:
        return loaded
    return replace(
        loaded,
        tensors=len(part.loaded),
        missing=part.missing,
        mismatched=part.mismatched,
        unexpected=part.unexpected,
    )


def _check_live(model: Any, optimizer: Any) -> None:
    """Raise `CkptError` if the model or the optimizer is not an object that can be loaded."""
    if not isinstance(model, Module):
        raise CkptError(
            f"load() puts a checkpoint into a module, not into {a(model)}",
            hint="pass the checkpoint first and then the module that loads it, as in"
            " ckpttool.load(ckpt, model)",
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise CkptError(
            f"load() puts state into an optimizer, not into {a(optimizer)}",
            hint="pass the torch.optim.Optimizer of the module's parameters",
        )


def _narrowed(
    source: Checkpoint, ckpt: Ckpt, section: str | None, select: str | None
) -> Checkpoint:
    """Return the checkpoint with one section, and of this one submodule, if they are named."""
    if section is not None and isinstance(ckpt, str):
        source = open_operand(f"{split(ckpt)[0]}::{section}")
    elif section is not None:
        source = pick(source, section)
    if select is None:
        return source
    return plan_remap(source, RemapOptions(select=select), None, None).result


def _hyperparameters(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """Return the hyperparameters of each param group."""
    groups = []
    for group in [] if optimizer is None else optimizer.param_groups:
        options = dict(group)
        for name in (PARAMS, PARAM_NAMES):
            options.pop(name, None)
        groups.append(options)
    return groups


def _changes(
    before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> tuple[HyperparameterChange, ...]:
    changes = []
    for index, (old, new) in enumerate(zip(before, after)):
        for name, value in new.items():
            if name not in old or not _is_same_option(old[name], value):
                changes.append(HyperparameterChange(index, name, old.get(name), value))
    return tuple(changes)


def _is_same_option(left: Any, right: Any) -> bool:
    if isinstance(left, (int, float)) and isinstance(right, (int, float)) and left == right:
        return True  # 1 and 1.0
    return same_value(left, right)


def _operand_of(model: Any) -> ModelOperand:
    """Return the model as an operand, to be built with real tensors if it cannot be built without
    values.
    """
    operand = ModelOperand(model)
    try:
        operand.names()
    except CannotBuild:
        real = ModelOperand(model, materialize=True)
        real.names()
        return real
    return operand
