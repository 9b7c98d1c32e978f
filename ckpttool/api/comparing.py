"""Verbs that say what differs: a diff, the files of a repository."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from ckpttool.api.reading import Ckpt, open_checkpoint
from ckpttool.api.takes import takes
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.options import OptimizerOptions, several
from ckpttool.core.text import plural
from ckpttool.diffing.options import DiffOptions
from ckpttool.distributed.job import only_first
from ckpttool.formats.registry import MANIFEST, MEMORY
from ckpttool.io import progress
from ckpttool.io.files import exists, is_glob
from ckpttool.operands.checkpoint import split
from ckpttool.operands.model import is_names_file

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.api.keywords import CheckKeywords, DiffKeywords
    from ckpttool.checks import Checks
    from ckpttool.diffing.history import Steps
    from ckpttool.diffing.result import Diff
    from ckpttool.diffing.three_way import Since


@takes(DiffOptions)
def diff(left: Ckpt | None = None, right: Ckpt | None = None, **options: Unpack[DiffKeywords]) -> Diff:
    """What differs, why, and the commands that mend it; `Diff.identical` is the answer.

    `left` is what there is, `right` what is expected. With `model` alone: what ``state_dict()`` writes against the
    runtime names. With `model` and `left`: identical exactly where ``load_state_dict(strict=True)`` would succeed and
    convert no dtype (`ignore_dtype` leaves that out). `values` compares the bytes too, `rtol` and `atol` as in
    ``torch.isclose``; with `whole` what stands beside the models counts too. Raises `CkptError` where something cannot
    be read, or there is nothing to compare.
    """
    return diff_by(left, right, DiffOptions(**options))


def diff_by(left: Ckpt | None, right: Ckpt | None, options: DiffOptions, suggests: bool = False) -> Diff:
    """`diff`, with its options as a value; `suggests`: with the rules that lead from a checkpoint to a model too."""
    from ckpttool.diffing.run import run
    from ckpttool.operands.model import ModelOperand, operand_of
    from ckpttool.operands.sections import read_for_model

    if options.comparison is None:
        only_first()
    if is_names_file(left):
        from ckpttool.fixes import candidates

        other = ModelOperand(right) if options.model is None and is_names_file(right) else None
        if right is not None and other is None:
            raise CkptError(f"{left} is a names file, and is compared with a model", hint="leave the checkpoint out")
        return _judged(candidates.run(str(left), other or operand_of(options), options), options)
    model = operand_of(options)
    opened = [None if ckpt is None else open_checkpoint(ckpt) for ckpt in (left, right)]
    first, second = (None if ckpt is None else read_for_model(ckpt, model) for ckpt in opened)
    with options.comparing(first, second):
        found = run(first, second, options, model)
    by_manifest = any(side is not None and side.format == MANIFEST.name for side in (first, second))
    only_beside = options.whole and not any(map(found.weighs, found.entries))
    if found.identical or only_beside or by_manifest:
        # Nothing to mend, or no values to mend it with: what could is a third of the program, and is not loaded.
        return _judged(found, options)
    from ckpttool.fixes.suggest import answered
    from ckpttool.fixes.trial import Question

    return _judged(answered(Question(first, second, options, model), found, suggests), options)


@takes(DiffOptions)
def steps(run: str | Sequence[Ckpt], **options: Unpack[DiffKeywords]) -> Steps:
    """Return what each checkpoint of a run changed since the one before: keys, dtypes, shapes, param groups.

    `run` is a folder, or the checkpoints. Paths that differ only in numbers are compared in the order of the numbers,
    everything else in the order given. `values` also compares bytes and hyperparameters. Raises `CkptError` if fewer
    than two checkpoints can be read.
    """
    return steps_by(run, DiffOptions(**options))


def steps_by(run: str | Sequence[Ckpt], options: DiffOptions) -> Steps:
    """`steps`, with its options as a value."""
    from ckpttool.diffing.history import compare_steps
    from ckpttool.operands.checkpoint import in_order, steps_in

    only_first()
    folder = run if isinstance(run, str) else None
    found: list[str | Checkpoint]
    names, others = steps_in(run) if isinstance(run, str) else ([one for one in run if isinstance(one, str)], [])
    if folder is None:
        _check_there(names)
    if isinstance(run, str) or len(names) == len(run):
        found = [*(names if isinstance(run, str) else in_order(names))]
    else:
        found = [one if isinstance(one, str) else _numbered(one, number) for number, one in enumerate(run)]
    with progress.doing(f"comparing {len(found)} checkpoints", None):
        return compare_steps(found, folder, options, others)


def _check_there(paths: Sequence[str]) -> None:
    """Raises `CkptError` for a step that was named and does not exist, which is not a change of the run."""
    missing = [path for path in paths if not exists(source := split(path)[0]) and not is_glob(source)]
    if missing:
        problems = [Problem("no such file", path) for path in missing]
        raise CkptError(f"{plural(len(missing), 'step')} not found", hint="check the paths", problems=problems)


@takes(DiffOptions)
def since(base: Ckpt, left: Ckpt, right: Ckpt, **options: Unpack[DiffKeywords]) -> Since:
    """What two checkpoints each changed since the one that both came from, and whether they agree where both did."""
    return since_by(base, left, right, DiffOptions(**options))


def since_by(base: Ckpt, left: Ckpt, right: Ckpt, options: DiffOptions) -> Since:
    """`since`, with its options as a value."""
    from ckpttool.diffing.three_way import compare_since

    if options.comparison is None:
        only_first()
    three = open_checkpoint(base), open_checkpoint(left), open_checkpoint(right)
    with options.comparing(*three, *three):  # each is compared with each
        return compare_since(*three, options)


def _numbered(ckpt: Ckpt, number: int) -> Checkpoint:
    checkpoint = open_checkpoint(ckpt)
    return replace(checkpoint, source=f"step {number}") if checkpoint.format == MEMORY.name else checkpoint


def _judged(diff: Diff, options: DiffOptions) -> Diff:
    if not options.says_what_fails:
        return diff
    from ckpttool.diffing.baseline import judged

    return judged(diff, options)


@takes(OptimizerOptions)
def check(files: str | Sequence[str], *, allow: str | Sequence[str] = (), **options: Unpack[CheckKeywords]) -> Checks:
    """Files of a repository, each for what it is: names files (against `model`), rules, plans, checkpoints.

    A checkpoint fails for dangerous and unknown imports of its pickles, but for what a shell pattern in `allow` names.
    """
    return check_by(files, OptimizerOptions(**options), allow)


def check_by(files: str | Sequence[str], options: OptimizerOptions, allow: str | Sequence[str] = ()) -> Checks:
    """`check`, with its options as a value."""
    from ckpttool import checks

    asked = {field.name: getattr(options, field.name) for field in fields(OptimizerOptions)}
    return checks.check(several(files) or (), DiffOptions(**asked), several(allow) or ())
