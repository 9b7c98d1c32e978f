"""``ckpttool diff``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import ckpttool
from ckpttool.cli.output import All, Report, write_text
from ckpttool.core.errors import CkptError
from ckpttool.core.options import Argument, keywords_of, option
from ckpttool.core.text import Info
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.result import Diff
from ckpttool.io.files import files_of, is_dir
from ckpttool.operands.checkpoint import split
from ckpttool.operands.model import is_names_file, operand_of

if TYPE_CHECKING:
    from ckpttool.diffing.history import Steps
    from ckpttool.diffing.three_way import Since
    from ckpttool.report.document import Document


def command(
    options: DiffOptions,
    report: Report,
    operands: Annotated[
        list[str] | None, Argument("[LEFT RIGHT | CKPT | RUN]", "Checkpoints, or the folder of a run.")
    ] = None,
    suggest: Annotated[
        str | None, option("--suggest", metavar="FILE", help="Write the rules that would mend it to FILE (TOML).")
    ] = None,
    update: Annotated[
        bool, option("--update", help="Rewrite the names file that is compared, with the names that MODEL has now.")
    ] = False,
    base: Annotated[
        str | None,
        option("--base", metavar="CKPT", help="What LEFT and RIGHT both came from: says what each changed since."),
    ] = None,
    exit_zero: Annotated[bool, option("--exit-zero", help="Status 0 also where they differ; errors stay 2.")] = False,
    all: All = False,
) -> int:
    """What differs, why, and the command that mends it.

    LEFT is what you have, RIGHT what is expected. With --model alone: what state_dict() writes against the runtime
    names. With --model and CKPT: CKPT against what the model loads; status 0 exactly where a strict load succeeds.
    With --model and a names file: what the model's code has changed since that was written.
    CKPT::optimizer, or --optimizer: the state of optimizers, by the names of their parameters where these are known.
    With --base: what LEFT and RIGHT each changed since BASE; status 1 where two changes are in each other's way.
    The folder of a run, or more than two checkpoints of one: which step changed the keys, the dtypes, the optimizer.

    \b
    Examples:
      ckpttool diff old.pt new.safetensors --values
      ckpttool diff --model model.py:build train.pt
      ckpttool diff names.json --model model.py:build
      ckpttool diff old.pt new.pt --suggest rules.toml
      ckpttool diff ours.pt theirs.pt --base pretrained.pt --values
      ckpttool diff runs/7/step-*.pt
    """
    named = operands or []
    read = [path for operand in filter(None, (*named, base)) for path in files_of(split(operand)[0])]
    report.check(read)
    result, document = _asked(options, named, base, suggest, update)
    report.emit(lambda: document(result, all=all), result.to_json)
    return 0 if result.passes or exit_zero or update else 1


def _asked(
    options: DiffOptions, operands: list[str], base: str | None, suggest: str | None, update: bool
) -> tuple[Diff | Since | Steps, Callable[..., Document]]:
    """The answer to the question that the operands put, and what shows it."""
    run = _run_of(operands, options.model, base)
    if run is not None:
        return _steps(run, options, bool(suggest or update))
    left, right = _two(operands)
    if base is not None:
        return _since(base, _sides(options, left, right, bool(suggest or update)), options)
    return _answered(options, left, right, suggest, update)


def _check(options: DiffOptions, left: str | None, right: str | None, suggest: str | None, update: bool) -> None:
    """Raises `CkptError` where options do not go with these operands."""
    if update and (not is_names_file(left) or options.model is None):
        hint = "ckpttool diff names.json --model MODEL --update; ckpttool trace MODEL -o names.json writes the first"
        raise CkptError("--update rewrites a names file, and none is compared with a model", hint=hint)
    one_other = (right is None) != (options.model is None)
    if suggest is not None and not is_names_file(left) and not (left is not None and one_other):
        hint = "ckpttool diff LEFT RIGHT --suggest FILE, or ckpttool diff LEFT --model MODEL --suggest FILE"
        raise CkptError("--suggest needs two checkpoints, or a model and one checkpoint or names file", hint=hint)


def _answered(
    options: DiffOptions, left: str | None, right: str | None, suggest: str | None, update: bool
) -> tuple[Diff, Callable[..., Document]]:
    """The diff, once what it is to write is written, and what shows it.

    Raises `CkptError` where options do not go with these operands.
    """
    from ckpttool.fixes.diff import diff_with_fixes
    from ckpttool.report.documents.diff import document

    _check(options, left, right, suggest, update)
    result = diff_with_fixes(left, right, options, suggest is not None)
    if suggest is not None:
        result = _written(result, suggest, is_names_file(left))
    return _updated(result, str(left), options) if update else result, document


def _two(operands: list[str]) -> tuple[str | None, str | None]:
    """LEFT and RIGHT, as far as they are named. Raises `CkptError` where more are."""
    left, right, *more = [*operands, None, None]
    if any(more):
        hint = "ckpttool diff LEFT RIGHT; with --base BASE what both changed since a third"
        raise CkptError("nothing to compare: these are more than two checkpoints", hint=hint)
    return left, right


def _run_of(operands: list[str], model: object, base: str | None) -> str | list[str] | None:
    """The folder of a run, or its checkpoints; None where something else is asked."""
    if model is not None or base is not None or len(operands) == 2:
        return None
    if len(operands) > 2:
        return operands
    return operands[0] if operands and is_dir(operands[0]) else None


def _check_of_more(options: DiffOptions, of_two: bool, message: str) -> None:
    """Raises `CkptError` where options are only for a diff of two; `of_two`: one of the command's own is."""
    if of_two or options.optimizer is not None or options.says_what_fails or options.whole:
        raise CkptError(message, hint="leave --suggest, --update, --optimizer, --whole, --fail-on and --ignore out")


def _steps(run: str | list[str], options: DiffOptions, of_two: bool) -> tuple[Steps, Callable[..., Document]]:
    """What each step changed, and what shows it. Raises `CkptError` where options do not go with it."""
    from ckpttool.report.documents.diff import history_document

    _check_of_more(options, of_two, "these are the steps of a run, and no option of a diff of two goes with them")
    return ckpttool.steps(run, **keywords_of(options)), history_document


def _sides(options: DiffOptions, left: str | None, right: str | None, of_two: bool) -> tuple[str, str]:
    """The two that came from a base. Raises `CkptError` where there are not two, or options do not go with it."""
    if left is None or right is None or is_names_file(left) or is_names_file(right):
        raise CkptError("--base is what two checkpoints came from", hint="ckpttool diff LEFT RIGHT --base BASE")
    _check_of_more(options, of_two, "--base asks what two sides changed, and takes no option of a diff of two")
    return left, right


def _since(base: str, sides: tuple[str, str], options: DiffOptions) -> tuple[Since, Callable[..., Document]]:
    """What the two changed since the base, and what shows it."""
    from ckpttool.report.documents.diff import three_way_document

    return ckpttool.since(base, *sides, **keywords_of(options)), three_way_document


def _updated(result: Diff, path: str, options: DiffOptions) -> Diff:
    """Rewrites the names file, where the model's code has other names than it."""
    from ckpttool.report.renderers import json

    model = operand_of(options)
    assert model is not None  # `_check` has looked
    names = json.render(model.names().to_json())
    if Path(path).read_text(encoding="utf-8") == names:
        return replace(result, notes=(*result.notes, Info(f"{path} is as it was")))
    write_text(path, names, force=True, in_place=True)
    return replace(result, notes=(*result.notes, Info(f"{path} has the names of {options.model} now")))


def _written(result: Diff, path: str, is_contract: bool) -> Diff:
    """Writes the rules that the diff suggests, and shows how they are used. Raises `CkptError` for another's file."""
    from ckpttool.fixes.candidates import migrates
    from ckpttool.fixes.rules_file import by_file

    if result.rules is None:
        note = f"no rules are suggested, and {path} was not written: no rules lead from left to right"
        return replace(result, notes=(*result.notes, note))
    if os.path.exists(path) and Path(path).read_text(encoding="utf-8", errors="replace") != result.rules:
        raise CkptError(f"{path} is there, and has other content", hint="give another FILE, or remove it first")
    write_text(path, result.rules, force=True)  # what is there is the same
    return migrates(result, path) if is_contract else by_file(result, path)
