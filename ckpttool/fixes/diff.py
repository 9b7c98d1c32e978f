"""`diff`: compare, and look for the commands that fix the differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.core.options import expand_options
from ckpttool.core.text import CKPT, shell
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.run import run
from ckpttool.distributed.job import only_first
from ckpttool.kinds.packed import PACKED
from ckpttool.operands.checkpoint import Ckpt, open_checkpoint
from ckpttool.operands.model import ModelOperand, operand_of
from ckpttool.operands.names_files import is_names_file
from ckpttool.operands.reading import read_for_model

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.diffing.result import Diff
    from ckpttool.keywords import DiffKeywords


@expand_options(DiffOptions)
def diff(
    left: Ckpt | None = None, right: Ckpt | None = None, **options: Unpack[DiffKeywords]
) -> Diff:
    """Return what differs, why, and the commands that fix it; `Diff.identical` is the answer.

    With `model` alone: what ``state_dict()`` writes against the runtime names. With `model` and
    `left`: identical exactly if ``load_state_dict(strict=True)`` would succeed and convert no dtype
    (`ignore_dtype` leaves that out).

    Args:
        left: The checkpoint that you have: anything that `open_checkpoint` takes, or a names file.
        right: The checkpoint that is expected, if it is not a model.
        **options: `model` is what is expected otherwise, `optimizer` its optimizer. `values`
            compares the bytes too, with `rtol` and `atol` as in ``torch.isclose``; `whole` also
            compares optimizer state and other entries.

    Returns:
        One entry for each key, with its status and cause, and the suggested commands in `fix`.

    Raises:
        CkptError: Something cannot be read, or there is nothing to compare.

    Example::

        diff = ckpttool.diff("wrapped.pt", model="model.py:build")
        if not diff.identical:
            print(diff.fix[0])
    """
    return diff_with_fixes(left, right, DiffOptions(**options))


def diff_with_fixes(
    left: Ckpt | None,
    right: Ckpt | None,
    options: DiffOptions,
    *,
    suggest_rules: bool = False,
    model: ModelOperand | None = None,
) -> Diff:
    """Return what `diff` returns; `suggest_rules`: also the rules that lead from a checkpoint to a
    model.

    `model` is the model of the options, if its names may be read already.
    """
    diff = _diff(left, right, options, suggest_rules, model or operand_of(options))
    if not options.says_what_fails:
        return diff
    from ckpttool.diffing.baseline import judged

    return judged(diff, options)


def _diff(
    left: Ckpt | None,
    right: Ckpt | None,
    options: DiffOptions,
    suggest_rules: bool,
    model: ModelOperand | None,
) -> Diff:
    if options.comparison is None:
        only_first()
    if is_names_file(left):
        from ckpttool.fixes.names import diff_names_file

        other = ModelOperand(right) if options.model is None and is_names_file(right) else None
        if right is not None and other is None:
            ckpt = right if isinstance(right, str) else CKPT
            raise CkptError(
                f"{left} is a names file: it is compared with a model, or is the model of a"
                " checkpoint",
                hint=shell("ckpttool", "diff", "--model", str(left), ckpt),
            )
        return diff_names_file(str(left), other or model, options)
    opened = (_opened(left), _opened(right))
    first, second = _read(opened[0], model), _read(opened[1], model)
    with options.comparing(first, second):
        diff = run(first, second, options, model)
    only_other_entries = options.whole and not any(map(diff.is_difference, diff.entries))
    if diff.identical and second is None and not diff.left_kinds.isdisjoint(PACKED):
        from ckpttool.fixes.question import DiffQuestion
        from ckpttool.fixes.suggest import unpacked

        return unpacked(DiffQuestion(first, None, options, model, diff))
    if diff.identical or only_other_entries:  # nothing to fix
        return diff
    # a third of the program, which the cases above need not load
    from ckpttool.fixes.question import DiffQuestion
    from ckpttool.fixes.suggest import answered

    return answered(
        DiffQuestion(first, second, options, model, diff, opened=opened),
        suggest_rules,
    )


def _opened(ckpt: Ckpt | None) -> Checkpoint | None:
    return None if ckpt is None else open_checkpoint(ckpt)


def _read(checkpoint: Checkpoint | None, model: ModelOperand | None) -> Checkpoint | None:
    return None if checkpoint is None else read_for_model(checkpoint, model)
