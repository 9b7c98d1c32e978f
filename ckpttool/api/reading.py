"""Verbs that look at one thing: a checkpoint, a model, a tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Union

from ckpttool.api.notebook import html
from ckpttool.api.takes import takes
from ckpttool.core import values
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.core.options import OptimizerOptions, several
from ckpttool.core.text import a
from ckpttool.formats.registry import MEMORY
from ckpttool.io.files import read_on
from ckpttool.operands.checkpoint import open_operand, split

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.api.keywords import OptimizerKeywords
    from ckpttool.core.names import Names
    from ckpttool.inspection.explain import Explanation
    from ckpttool.inspection.inspect import Inspection

values.to_html = html  # results know nothing of reports

# What torch.save writes: a dict of any keys, a list or a tuple, with tensors anywhere inside.
Ckpt = Union[str, Checkpoint, Mapping[Any, Any], "list[Any]", "tuple[Any, ...]"]


@takes()
def open_checkpoint(ckpt: Ckpt) -> Checkpoint:
    """Return the index of a checkpoint: keys, dtypes, shapes, and where the bytes are. No tensor is read.

    `ckpt` is a path, a URL, ``PATH::SECTION``, or an object in memory: a dict, list or tuple that `torch.save` could
    save. The index of an object is the one of the file that `torch.save` would write. Raises `CkptError` if it cannot
    be read, if it has no such section, or if files of the index have changed since.
    """
    if isinstance(ckpt, Checkpoint):
        read_on(ckpt.files)
        return ckpt
    if isinstance(ckpt, str):
        return open_operand(ckpt)
    if not isinstance(ckpt, (Mapping, list, tuple)):
        raise CkptError(f"{a(ckpt)} is not a checkpoint", hint="pass a path or a URL as text, or a state dict")
    from ckpttool.live.saved import checkpoint_of

    return checkpoint_of(ckpt)


@takes()
def inspect(ckpt: Ckpt, *, stats: bool = False, filter: str | None = None) -> Inspection:
    """What is in a checkpoint: sections, keys, dtypes, shapes, aliases, wrappers; with `stats` its values.

    `filter` is a pattern, as of `remap`'s `drop`, that names the tensors which are looked at; a note says how many
    others there are. Raises `CkptError` where something cannot be read.
    """
    from ckpttool.inspection import inspect

    checkpoint = open_checkpoint(ckpt)
    if filter is not None:
        from ckpttool.remapping.plan import only

        checkpoint = only(checkpoint, filter)
    return inspect.inspect(checkpoint, stats=stats)


@takes()
def manifest(ckpt: Ckpt, *, leave_out: str | Collection[str] = ()) -> dict[str, Any]:
    """Return a digest of every file and every tensor of a checkpoint, as the JSON of an in-toto statement.

    `diff` with `values` compares a checkpoint with it. Files of a folder in `leave_out` are not listed. An object in
    memory has no files, so its statement has no subject. Raises `CkptError` if something cannot be read.
    """
    from ckpttool.formats.manifest import statement

    checkpoint = open_checkpoint(ckpt)
    path, section = split(checkpoint.source)
    if section is not None:
        raise CkptError("a manifest is of whole files", hint=f"leave ::{section} out")
    return statement(checkpoint, None if checkpoint.format == MEMORY.name else path, several(leave_out) or ())


@takes(OptimizerOptions)
def trace(model: Any, **options: Unpack[OptimizerKeywords]) -> Names:
    """Every name of every tensor of a model, and with `optimizer` the ids of its parameters.

    Raises `CkptError` where the model's own code fails.
    """
    return trace_by(OptimizerOptions(model=model, **options))


def trace_by(options: OptimizerOptions) -> Names:
    """`trace`, with its options as a value."""
    from ckpttool.operands.model import ModelOperand

    return ModelOperand(options.model, options.model_kwargs, options.materialize, options.optimizer).names()


@takes(OptimizerOptions)
def explain(name: str, model: Any, **options: Unpack[OptimizerKeywords]) -> Explanation:
    """One tensor: its name in every form, its aliases, its optimizer id, the hook that renames it.

    `name` is its name in any form. Raises `CkptError`, with names that are like it, where the model has none.
    """
    return explain_by(name, OptimizerOptions(model=model, **options))


def explain_by(name: str, options: OptimizerOptions) -> Explanation:
    """`explain`, with its options as a value."""
    from ckpttool.inspection import explain

    return explain.explain(trace_by(options), name)
