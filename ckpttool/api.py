"""The front door: the verbs of the command line as functions, with the same words.

Wherever the command line takes CKPT, these take its text, a `Checkpoint`, or a state dict in memory; wherever it takes
MODEL, its text, a `Names`, or an object: a module, a class, a factory, an exported program. Options are the fields of
the options' dataclass, those of the command in Python's spelling (``to``, ``from_``, ``optimizer_keys``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, TypeVar, Union

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits.remap.options import RemapOptions
from ckpttool.edits.swap.options import SwapOptions
from ckpttool.errors import CkptError
from ckpttool.formats.table import MANIFEST
from ckpttool.operands.checkpoint import open_operand, split
from ckpttool.operands.names_file import is_names_file
from ckpttool.options import OptimizerOptions
from ckpttool.queries.diff.options import DiffOptions

if TYPE_CHECKING:
    from ckpttool.checks import Checks
    from ckpttool.edits.remap.result import Remap
    from ckpttool.edits.swap.swap import Swap
    from ckpttool.edits.write import Progress
    from ckpttool.live.swap import Swapped
    from ckpttool.names import Names
    from ckpttool.queries.diff.result import Diff
    from ckpttool.queries.diff.since import Since
    from ckpttool.queries.explanation import Explanation
    from ckpttool.queries.inspection import Inspection

Ckpt = Union[str, Checkpoint, Mapping[str, Any]]
Function = TypeVar("Function", bound=Callable[..., Any])


def _takes(options: type[Any]) -> Callable[[Function], Function]:
    """Shows the fields of the dataclass in the function's signature, in the place of ``**options``."""

    def decorate(function: Function) -> Function:
        own = [p for p in Signature.from_callable(function).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        taken = {parameter.name for parameter in own}
        more = [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default)
            for field in fields(options)
            if field.name not in taken
        ]
        function.__signature__ = Signature([*own, *more])  # type: ignore[attr-defined]
        return function

    return decorate


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


def _with_values(ckpt: Ckpt) -> Checkpoint:
    checkpoint = open_checkpoint(ckpt)
    if checkpoint.format == MANIFEST.name:
        raise CkptError(f"{checkpoint.source} is a manifest: digests, and no values", hint="name the checkpoint itself")
    return checkpoint


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
    return statement(open_checkpoint(path), path, leave_out)


@_takes(OptimizerOptions)
def trace(model: Any, **options: Any) -> Names:
    """Every name of every tensor of a model, and with `optimizer` the ids of its parameters.

    Raises `CkptError` where the model's own code fails.
    """
    return trace_by(OptimizerOptions(model=model, **options))


def trace_by(options: OptimizerOptions) -> Names:
    """`trace`, with its options as a value."""
    from ckpttool.operands.model import ModelOperand

    return ModelOperand(options.model, options.model_kwargs, options.materialize, options.optimizer).names()


@_takes(OptimizerOptions)
def explain(name: str, model: Any, **options: Any) -> Explanation:
    """One tensor: its name in every form, its aliases, its optimizer id, the hook that renames it.

    `name` is its name in any form. Raises `CkptError`, with names that are like it, where the model has none.
    """
    return explain_by(name, OptimizerOptions(model=model, **options))


def explain_by(name: str, options: OptimizerOptions) -> Explanation:
    """`explain`, with its options as a value."""
    from ckpttool.queries import explanation

    return explanation.explain(trace_by(options), name)


@_takes(DiffOptions)
def diff(left: Ckpt | None = None, right: Ckpt | None = None, **options: Any) -> Diff:
    """What differs, why, and the commands that mend it; `Diff.identical` is the answer.

    `left` is what there is, `right` what is expected. With `model` alone: what ``state_dict()`` writes against the
    runtime names. With `model` and `left`: identical exactly where ``load_state_dict(strict=True)`` would succeed and
    convert no dtype (`ignore_dtype` leaves that out). `values` compares the bytes too, `rtol` and `atol` as in
    ``torch.isclose``. Raises `CkptError` where something cannot be read, or there is nothing to compare.
    """
    return diff_by(left, right, DiffOptions(**options))


def diff_by(left: Ckpt | None, right: Ckpt | None, options: DiffOptions) -> Diff:
    """`diff`, with its options as a value."""
    from ckpttool.operands.model import ModelOperand, operand_of
    from ckpttool.queries.diff.run import run

    if is_names_file(left):
        from ckpttool.edits.mend import contract

        other = ModelOperand(right) if options.model is None and is_names_file(right) else None
        if right is not None and other is None:
            raise CkptError(f"{left} is a names file, and is compared with a model", hint="leave the checkpoint out")
        return _judged(contract.run(str(left), other or operand_of(options), options), options)
    first, second = (None if ckpt is None else open_checkpoint(ckpt) for ckpt in (left, right))
    model = operand_of(options)
    found = run(first, second, options, model)
    if found.identical or any(side is not None and side.format == MANIFEST.name for side in (first, second)):
        # Nothing to mend, or no values to mend it with: what could is a third of the program, and is not loaded.
        return _judged(found, options)
    from ckpttool.edits.mend.attempt import Question
    from ckpttool.edits.mend.run import answered

    return _judged(answered(Question(first, second, options, model), found), options)


@_takes(DiffOptions)
def since(base: Ckpt, left: Ckpt, right: Ckpt, **options: Any) -> Since:
    """What two checkpoints each changed since the one that both came from, and whether they agree where both did."""
    return since_by(base, left, right, DiffOptions(**options))


def since_by(base: Ckpt, left: Ckpt, right: Ckpt, options: DiffOptions) -> Since:
    """`since`, with its options as a value."""
    from ckpttool.queries.diff.since import compare_since

    return compare_since(open_checkpoint(base), open_checkpoint(left), open_checkpoint(right), options)


def _judged(diff: Diff, options: DiffOptions) -> Diff:
    if not options.says_what_fails:
        return diff
    from ckpttool.accepted import judged

    return judged(diff, options)


@_takes(OptimizerOptions)
def check(files: Sequence[str], *, allow: Sequence[str] = (), **options: Any) -> Checks:
    """Files of a repository, each for what it is: names files (against `model`), rules, plans, checkpoints.

    A checkpoint's pickles may call for what is torch's own, and what a shell pattern in `allow` names.
    """
    return check_by(files, OptimizerOptions(**options), allow)


def check_by(files: Sequence[str], options: OptimizerOptions, allow: Sequence[str] = ()) -> Checks:
    """`check`, with its options as a value."""
    from ckpttool import checks

    asked = {field.name: getattr(options, field.name) for field in fields(OptimizerOptions)}
    return checks.check(files, DiffOptions(**asked), allow)


@_takes(RemapOptions)
def remap(ckpt: Ckpt, out: str | None = None, *, progress: Progress | None = None, **options: Any) -> Remap:
    """Rewrites the keys, optimizer ids and format of a checkpoint; writes OUT where one is named.

    `progress` is called with a title and a number of bytes, and gives a context manager of a function that is told how
    many bytes are done. Raises `Refused`, all problems at once, where something would be lost, collide or have to be
    guessed, `CkptError` where something cannot be read or written.
    """
    return remap_by(ckpt, RemapOptions(out=out, **options), progress)


def remap_by(ckpt: Ckpt, options: RemapOptions, progress: Progress | None = None) -> Remap:
    """`remap`, with its options as a value."""
    from ckpttool.edits.run import run, undone
    from ckpttool.edits.write import quiet

    options.check(ckpt if isinstance(ckpt, str) else None)
    if options.undo:
        return undone(ckpt, options)
    return run(_with_values(ckpt), options, progress or quiet)


@_takes(SwapOptions)
def swap_weights(
    program: Any, new: Ckpt, out: str | None = None, *, progress: Progress | None = None, **options: Any
) -> Swap | Swapped:
    """Puts new weights into an exported program: a file, or a program, module or compiled package in memory.

    A file is ``PATH`` or ``PATH::NAME``, and OUT is written where one is named. For what is in memory, `new` is a state
    dict and the options are those of `live.swap_weights`. Raises `Refused`, all problems at once, where the weights do
    not fit.
    """
    if isinstance(program, str):
        return swap_weights_by(program, new, SwapOptions(out=out, **options), progress)
    from ckpttool.live import swap_weights as swap_in_memory

    return swap_in_memory(program, new, **options)  # type: ignore[arg-type]  # it says what is no state dict


def swap_weights_by(program: str, new: Ckpt, options: SwapOptions, progress: Progress | None = None) -> Swap:
    """`swap_weights` into a file, with its options as a value."""
    from ckpttool.edits.swap.run import run
    from ckpttool.edits.write import quiet

    options.check()
    return run(program, _with_values(new), options, progress or quiet)


def write(checkpoint: Checkpoint, out: str, **options: Any) -> None:
    """Writes a checkpoint, what `open_checkpoint` or `remap` gave, to the file or folder OUT, whole or not at all.

    `options` are those of `remap` that are about the output. Raises `CkptError` where OUT exists (`force` overwrites
    it), `Refused` where its format cannot hold what is in the checkpoint.
    """
    remap(checkpoint, out, **options)
