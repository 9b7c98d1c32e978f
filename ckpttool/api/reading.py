"""Verbs that look at one thing: a checkpoint, a model, a tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Union

from ckpttool.api.takes import takes
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkptError
from ckpttool.io.files import read_on
from ckpttool.operands.checkpoint import open_operand, split
from ckpttool.options import OptimizerOptions, several
from ckpttool.words import a

if TYPE_CHECKING:
    from ckpttool.names import Names
    from ckpttool.queries.explanation import Explanation
    from ckpttool.queries.inspection import Inspection

Ckpt = Union[str, Checkpoint, Mapping[str, Any]]


def open_checkpoint(ckpt: Ckpt) -> Checkpoint:
    """The index of a checkpoint: keys, dtypes, shapes, and where the bytes lie; no tensor is read.

    `ckpt` is a path, a URL, or ``PATH::SECTION``; a state dict in memory becomes an index of its memory. Raises
    `CkptError` where it cannot be read, or has no such section, and for an index of files that have changed since.
    """
    if isinstance(ckpt, Checkpoint):
        read_on(ckpt.files)
        return ckpt
    if isinstance(ckpt, str):
        return open_operand(ckpt)
    if not isinstance(ckpt, Mapping):
        raise CkptError(f"{a(ckpt)} is no checkpoint", hint="pass a path or a URL as text, or a state dict")
    from ckpttool.live.section import section_of

    return Checkpoint("a state dict in memory", "memory", 0, (section_of(ckpt),))


def inspect(ckpt: Ckpt, *, stats: bool = False, filter: str | None = None) -> Inspection:
    """What is in a checkpoint: sections, keys, dtypes, shapes, aliases, wrappers; with `stats` its values.

    `filter` is a pattern, as of `remap`'s `drop`, that names the tensors which are looked at; a note says how many
    others there are. Raises `CkptError` where something cannot be read.
    """
    from ckpttool.queries import inspection

    checkpoint = open_checkpoint(ckpt)
    if filter is not None:
        from ckpttool.edits.remap.drop import only

        checkpoint = only(checkpoint, filter)
    return inspection.inspect(checkpoint, stats=stats)


def manifest(ckpt: str, *, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """A digest of every file and every tensor of a checkpoint, as the JSON of an in-toto statement.

    `diff` with `values` compares a checkpoint with it. Files of a folder that are in `leave_out` are no part of it.
    Raises `CkptError` where something cannot be read.
    """
    from ckpttool.formats.manifest import statement

    path, section = split(ckpt)
    if section is not None:
        raise CkptError("a manifest is of whole files", hint=f"leave ::{section} out")
    return statement(open_checkpoint(path), path, several(leave_out) or ())


@takes(OptimizerOptions)
def trace(model: Any, **options: Any) -> Names:
    """Every name of every tensor of a model, and with `optimizer` the ids of its parameters.

    Raises `CkptError` where the model's own code fails.
    """
    return trace_by(OptimizerOptions(model=model, **options))


def trace_by(options: OptimizerOptions) -> Names:
    """`trace`, with its options as a value."""
    from ckpttool.operands.model import ModelOperand

    return ModelOperand(options.model, options.model_kwargs, options.materialize, options.optimizer).names()


@takes(OptimizerOptions)
def explain(name: str, model: Any, **options: Any) -> Explanation:
    """One tensor: its name in every form, its aliases, its optimizer id, the hook that renames it.

    `name` is its name in any form. Raises `CkptError`, with names that are like it, where the model has none.
    """
    return explain_by(name, OptimizerOptions(model=model, **options))


def explain_by(name: str, options: OptimizerOptions) -> Explanation:
    """`explain`, with its options as a value."""
    from ckpttool.queries import explanation

    return explanation.explain(trace_by(options), name)
