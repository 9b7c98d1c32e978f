"""`load`: a checkpoint into a live model; `save_names` and `check_names`: the names of a model in a unit test."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.optimizer_state import ID
from ckpttool.core.options import expand_options
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass, public
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.run import run
from ckpttool.fixes import suggest
from ckpttool.fixes.diff import diff as diff_with_fix
from ckpttool.fixes.fix import applicable
from ckpttool.fixes.trial import Question, try_remap
from ckpttool.io import sources
from ckpttool.io.pieces import Piece
from ckpttool.io.write import WriteOptions, preflight, write_file
from ckpttool.operands.checkpoint import Ckpt, model_section, open_with_values
from ckpttool.operands.model import ModelOperand, read_for_model, trace
from ckpttool.operands.output import command
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.run import plan_remap
from ckpttool.report.renderers import json

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.core.checkpoint import Checkpoint, Section
    from ckpttool.keywords import OptimizerKeywords
    from ckpttool.live.load import Module, Optimizer


@public
@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` did.

    `section` is the path of the state dict in the file, None if only the optimizer was loaded; `tensors` counts the
    tensors of the model that got values; `fix` is the call or command of the remap that was applied on the way,
    None if the keys fit as they were; `optimizer` is the path of the optimizer's state, None if it was not loaded.
    """

    ckpt: str
    section: str | None
    tensors: int
    fix: str | None
    optimizer: str | None


@expand_options()
def load(
    ckpt: Ckpt, model: Module, optimizer: Optimizer | None = None, *, definition: Any = None, cast: bool = False
) -> Loaded:
    """Load a checkpoint into a live model, and into its optimizer, whatever wrappers and containers are between them.

    `ckpt` is anything that `open_checkpoint` takes. Its keys may lack or have the segments of DDP, FSDP,
    `torch.compile` and Lightning, or be the names of an exported program: the remap that `diff` would suggest is
    applied, and only if a strict load succeeds after it. Nothing is inferred from shapes. Optimizer state may be by
    ids or by names, in the order of this optimizer or another one; a file with an optimizer alone is loaded into
    `optimizer`. Values are written into the existing tensors. Those of local files are read through a memory map;
    remote ones are held in memory until all are there. Pickles are read and never run.

    A sharded module (`fully_shard`, FSDP1) needs `definition`: the function, class or ``file.py:build`` operand that
    builds the model before it is sharded. Every rank calls `load`. `cast` allows other dtypes.

    Raise `Refused`, with all problems at once, if the checkpoint does not fit, and `CkptError` if it cannot be read.
    If anything is raised, model and optimizer are unchanged.

    Example::

        loaded = ckpttool.load("run/last.ckpt", model, optimizer)
        print(loaded.fix)  # the call that would write the same keys to a file, or None
    """
    from ckpttool.live.load import check_copyable, innermost, like, put

    sources.begin_call()
    core = innermost(model)
    if definition is None:
        check_copyable(core)
    operand = ModelOperand(core if definition is None else definition)
    source = read_for_model(open_with_values(ckpt), operand)
    if not source.state_dicts and optimizer is not None:
        section, fix = None, None
    else:
        section, fix = _fitting_model(source, operand, cast)
    path, state = None, None
    if optimizer is not None:
        path, state = _fitting_state(source, operand.with_optimizer(like(optimizer, core)))
    count = put(model, section, operand, optimizer, state, cast)
    return Loaded(source.source, None if section is None else model_section(source).path, count, fix, path)


def _fitting_model(source: Checkpoint, model: ModelOperand, cast: bool) -> tuple[Section, str | None]:
    """Return a section that a strict load takes, and the command that makes it, if there is one."""
    options = DiffOptions(model=model, ignore_dtype=cast)
    diff = run(source, None, options, model)
    if diff.identical:
        return model_section(source), None
    found = suggest.answered(Question(source, None, options, model, diff))
    fix = applicable(found, command("diff", (source.source,), options))
    done = plan_remap(source, fix.options, None if fix.options.model is None else model, None)
    return model_section(done.result), str(fix)


def _fitting_state(source: Checkpoint, model: ModelOperand) -> tuple[str, Mapping[Any, Any]]:
    """Return the path of the optimizer's state, and the state by the ids of the optimizer of `model`."""
    options = DiffOptions(model=model, optimizer=model.optimizer)
    diff = run(source, None, options, model)
    question = Question(source, None, options, model, diff)
    if diff.remedy is None:
        remap = RemapOptions(model=model, optimizer=model.optimizer, optimizer_keys=ID)
    else:
        word, remap = suggest.optimizer_remap(question, diff.remedy)
        fix = None if suggest.has_placeholder(remap) else try_remap(question, remap, word)
        if fix is None or fix.after.remedy is not None:
            answer = suggest.answered(question)
            hint = "; ".join((*answer.fix, *answer.notes[-2:])) or "start the optimizer from scratch"
            raise Refused(f"the optimizer state of {source.source} does not fit this optimizer", hint=hint)
        remap = replace(remap, optimizer_keys=ID)
    done = plan_remap(source, remap, model, None)
    (section,) = (section for section in done.result.sections if section.kind == "optimizer")
    assert section.mapping is not None
    return section.path, section.mapping


def save_names(model: Any, path: str, **options: Unpack[OptimizerKeywords]) -> None:
    """Write the names file of a model, as ``ckpttool trace MODEL -o PATH --force`` does.

    Raise `CkptError` if the model's own code fails, or if the file cannot be written.
    """
    text = json.render(trace(model, **options).to_json())
    preflight(path, (), force=True, in_place=True)
    write_file([Piece(text.encode("utf-8", "backslashreplace"))], path, WriteOptions(replace=True, in_place=True))


def check_names(model: Any, path: str, **options: Unpack[OptimizerKeywords]) -> None:
    """Compare a model with the names file at `path`, which `save_names` wrote: for a unit test.

    Raise `Refused`, with every changed name, if they differ, and `CkptError` if there is no such file.

    Example::

        def test_names_of_checkpoints_stay():
            ckpttool.check_names(build(), "tests/names.json")
    """
    again = f"ckpttool.save_names(model, {path!r})"
    if not os.path.exists(path):
        raise CkptError(f"{path} does not exist", hint=f"{again} writes it")
    diff = diff_with_fix(path, model=model, **options)
    if not diff.identical:
        changed = [entry for entry in diff.entries if diff.is_difference(entry)]
        sides = path, "the model"
        problems = [Problem(entry.why(sides), " -> ".join((*entry.left, *entry.right))) for entry in changed]
        message = f"{plural(len(changed), 'name')} of the model changed since {path} was written"
        raise Refused(message, hint=f"if checkpoints may change, {again} accepts it", problems=problems)
