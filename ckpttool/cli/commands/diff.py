"""``ckpttool diff``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from ckpttool.cli.output import All, ExitZero, Report, write_text
from ckpttool.core.errors import CkptError
from ckpttool.core.options import Argument, Option
from ckpttool.core.text import CKPT, Info, Note, shell
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.result import Diff, Fix
from ckpttool.operands.checkpoint import is_code, is_folder
from ckpttool.operands.model import operand_of
from ckpttool.operands.names_files import is_names_file
from ckpttool.operands.output import free


def command(
    options: DiffOptions,
    report: Report,
    operands: Annotated[
        list[str] | None,
        Argument("[LEFT RIGHT | CKPT]", "Checkpoints, or a names file that `trace` wrote."),
    ] = None,
    suggest: Annotated[
        str | None,
        Option("--suggest FILE", "Write rules that fix the differences to FILE (TOML).", "Output"),
    ] = None,
    update: Annotated[
        bool,
        Option(
            "--update",
            "Rewrite the names file that is compared, with the names that MODEL has now.",
            "Output",
        ),
    ] = False,
    exit_zero: ExitZero = False,
    all: All = False,
) -> int:
    """What differs, why, and the command that fixes it.

    LEFT is what you have, RIGHT what is expected. With --model alone: what state_dict() writes
    against the runtime names. With --model and CKPT: CKPT against what the model loads; status 0
    exactly if a strict load succeeds. With --model and a names file: what the model's code has
    changed since that was written. CKPT::optimizer, or --optimizer: the state of optimizers, by the
    names of their parameters where these are known.

    \b
    Examples:
      ckpttool diff old.pt new.safetensors --values
      ckpttool diff --model model.py:build train.pt
      ckpttool diff names.json --model model.py:build
      ckpttool diff old.pt new.pt --suggest rules.toml
    """
    from ckpttool.report.documents.diff import document

    named = operands or []
    report.check(named)
    if len(named) > 2:
        raise CkptError(
            "diff compares two checkpoints",
            hint=f"compare two of them at a time: {shell('ckpttool', 'diff', *named[:2])}",
        )
    if len(named) == 1 and options.model is None and is_folder(named[0]):
        raise CkptError(
            "diff compares two checkpoints",
            hint=f"name two: {shell('ckpttool', 'diff', named[0], 'RIGHT')}",
        )
    if options.model is None:
        _check_models(named)
    left, right = (*named, None, None)[:2]
    result = _diff_of_two(options, left, right, suggest, update)
    report.emit(partial(document, result, all=all), result.to_json)
    return 0 if result.passes or exit_zero or update else 1


def _check_models(operands: Sequence[str]) -> None:
    """Raise `CkptError`, with the command that compares them, if operands are models."""
    models = [operand for operand in operands if is_code(operand)]
    if not models:
        return
    checkpoints = [operand for operand in operands if operand not in models]
    command = shell("ckpttool", "diff", *checkpoints, "--model", models[-1])
    if len(models) > 1:
        command = line_of_models(models[0], models[1])
    raise CkptError(f"{models[0]} is a model, and diff compares checkpoints", hint=command)


def line_of_models(old: str, new: str) -> str:
    """Return the commands that compare the names of two models."""
    file = free("names", "old", ".json") if os.path.lexists("names.json") else "names.json"
    trace = shell("ckpttool", "trace", old, "-o", file)
    return f"{trace} && {shell('ckpttool', 'diff', file, '--model', new)}"


def _diff_of_two(
    options: DiffOptions, left: str | None, right: str | None, suggest: str | None, update: bool
) -> Diff:
    """Return the diff, after writing the files that `--suggest` and `--update` request."""
    from ckpttool.fixes.diff import diff_with_fixes

    of_names = is_names_file(left)
    if update and (not of_names or options.model is None):
        hint = (
            "ckpttool diff names.json --model MODEL --update; ckpttool trace MODEL -o"
            " names.json writes the first"
        )
        raise CkptError(
            "--update rewrites a names file, and none is compared with a model", hint=hint
        )
    one_other = (right is None) != (options.model is None)
    if suggest == "-":
        raise CkptError("--suggest writes a file", hint="name it: --suggest rules.toml")
    if suggest is not None and not of_names and not (left is not None and one_other):
        hint = (
            "ckpttool diff LEFT RIGHT --suggest FILE, or ckpttool diff LEFT --model MODEL"
            " --suggest FILE"
        )
        raise CkptError(
            "--suggest needs two checkpoints, or a model and one checkpoint or names file",
            hint=hint,
        )
    result = diff_with_fixes(left, right, options, suggest_rules=suggest is not None)
    if suggest is not None:
        result = _with_rules_written(result, suggest, of_names)
    if not update:
        return result
    from ckpttool.report.renderers import json

    model, path = operand_of(options), str(left)
    assert model is not None
    names = json.render(model.names().to_json())
    if Path(path).read_text(encoding="utf-8") == names:
        return replace(result, notes=(*result.notes, Info(f"{path} is as it was", "written")))
    write_text(path, names, force=True, in_place=True)
    return replace(
        result,
        notes=(*result.notes, Info(f"{path} has the names of {options.model} now", "written")),
    )


def _with_rules_written(result: Diff, path: str, of_names: bool) -> Diff:
    """Write the rules that the diff suggests, and show how to use them. Raise `CkptError` for
    another's file.
    """
    from ckpttool.fixes.rules_file import by_file

    if result.rules is None:
        words = (
            "no rules are suggested, and {} was not written: no rules lead from {left} to {right}"
        )
        return replace(result, notes=(*result.notes, Note.about(words, "no-fix", path)))
    if (
        os.path.exists(path)
        and Path(path).read_text(encoding="utf-8", errors="replace") != result.rules
    ):
        raise CkptError(
            f"{path} is there, and has other content", hint="give another FILE, or remove it first"
        )
    write_text(path, result.rules, force=True)  # what is there is the same
    if result.rules_options is None:
        words = "{} has the rules, which no remap applies to {left} as it is"
        return replace(result, notes=(*result.notes, Note.about(words, "no-fix", path)))
    ckpt = CKPT if of_names else result.left
    fix = result.fix[-1]
    line = by_file(ckpt, path, result.rules_options)
    return replace(result, fix=(Fix(line, complete=fix.complete, tried=fix.tried),))
