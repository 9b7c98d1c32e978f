"""The front door: the verbs of the command line as functions, with the same words.

Wherever the command line takes CKPT, these take its text, a `Checkpoint`, or a state dict in memory; wherever it takes
MODEL, its text, a `Names`, or an object: a module, a class, a factory, an exported program.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Union

from ckpttool.checkpoint import Checkpoint
from ckpttool.operands.checkpoint import open_operand
from ckpttool.operands.model import ModelOperand

if TYPE_CHECKING:
    from ckpttool.names import Names
    from ckpttool.queries.diff.result import Diff
    from ckpttool.queries.explanation import Explanation
    from ckpttool.queries.inspection import Inspection

Ckpt = Union[str, Checkpoint, Mapping[str, Any]]


def open_checkpoint(ckpt: Ckpt) -> Checkpoint:
    """The index of a checkpoint: keys, dtypes, shapes, and where the bytes lie; no tensor is read.

    `ckpt` is a path, a URL, or ``PATH::SECTION``; a state dict in memory becomes an index of its memory. Raises
    `CkptError` where it cannot be read, or has no such section.
    """
    if isinstance(ckpt, Checkpoint):
        return ckpt
    if isinstance(ckpt, str):
        return open_operand(ckpt)
    from ckpttool.live.section import section_of

    return Checkpoint("a state dict in memory", "memory", 0, (section_of(ckpt),))


def inspect(ckpt: Ckpt) -> Inspection:
    """What is in a checkpoint: sections, keys, dtypes, shapes, aliases, wrappers. Raises `CkptError`."""
    from ckpttool.queries import inspection

    return inspection.inspect(open_checkpoint(ckpt))


def trace(
    model: Any, *, model_kwargs: Mapping[str, Any] | None = None, materialize: bool = False, optimizer: Any = None
) -> Names:
    """Every name of every tensor of a model, and with `optimizer` the ids of its parameters.

    `model_kwargs` are passed to a factory, `materialize` builds it with real weights instead of on the meta device.
    Raises `CkptError` where the model's own code fails.
    """
    return ModelOperand(model, model_kwargs, materialize, optimizer).names()


def explain(
    name: str,
    model: Any,
    *,
    model_kwargs: Mapping[str, Any] | None = None,
    materialize: bool = False,
    optimizer: Any = None,
) -> Explanation:
    """One tensor: its name in every form, its aliases, its optimizer id, the hook that renames it.

    `name` is its name in any form. Raises `CkptError`, with names that are like it, where the model has none.
    """
    from ckpttool.queries import explanation

    return explanation.explain(ModelOperand(model, model_kwargs, materialize, optimizer).names(), name)


def diff(
    left: Ckpt | None = None,
    right: Ckpt | None = None,
    *,
    model: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
    materialize: bool = False,
    optimizer: Any = None,
    values: bool = False,
    rtol: float = 0.0,
    atol: float = 0.0,
    ignore_dtype: bool = False,
) -> Diff:
    """What differs, why, and the commands that mend it; `Diff.identical` is the answer.

    `left` is what there is, `right` what is expected. With `model` alone: what ``state_dict()`` writes against the
    runtime names. With `model` and `left`: identical exactly where ``load_state_dict(strict=True)`` would succeed and
    convert no dtype (`ignore_dtype` leaves that out). `values` compares the bytes too, `rtol` and `atol` as in
    ``torch.isclose``. Raises `CkptError` where something cannot be read, or there is nothing to compare.
    """
    from ckpttool.evaluate.compare import difference
    from ckpttool.queries.diff import run

    operand = None if model is None else ModelOperand(model, model_kwargs, materialize, optimizer)
    how = partial(difference, rtol=rtol, atol=atol) if values or rtol or atol else None
    first, second = (None if ckpt is None else open_checkpoint(ckpt) for ckpt in (left, right))
    found = run.diff(first, second, operand, how, ignore_dtype)
    if first is None or second is None or found.inferred is None:
        return found
    from ckpttool.edits.rules.mend import with_rules

    return with_rules(found, first, second, how is not None)
