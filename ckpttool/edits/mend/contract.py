"""What migrates deployed checkpoints to the names that a model's code has now."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.edits.mend.command import untried
from ckpttool.edits.rules.mend import INFERRED, Suggested, by_file, needs_file
from ckpttool.errors import CkptError
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.names_file import read_names, saved_by
from ckpttool.operands.printed import free
from ckpttool.queries.diff.contract import compare_with_code, is_of_keys
from ckpttool.queries.diff.options import DiffOptions
from ckpttool.queries.diff.result import Diff
from ckpttool.words import shell

CKPT = "CKPT"
_BOTH = "no rule brings an optimizer's state into another order: once the keys are renamed, this says what it needs"


def run(path: str, model: ModelOperand | None, options: DiffOptions) -> Diff:
    """The names file at `path` against the model's code, and the commands that rename a checkpoint with the old names.

    Raises `CkptError` where no model is named, or the options ask for values.
    """
    if model is None:
        hint = f"{shell('ckpttool', 'diff', path)} --model MODEL"
        raise CkptError(f"{path} is a names file, and no model is named that is to have these names", hint=hint)
    if options.comparison is not None:
        raise CkptError(f"--values: {path} is a names file, and has none", hint="leave --values out")
    old = read_names(path)
    diff = compare_with_code(old, path, model)
    shifted = any(entry.status == "order" for entry in diff.entries)
    ruled = Suggested(_of_keys(diff), saved_by(old), saved_by(model.names())).told()
    fix = ruled.fix
    if needs_file(ruled):
        rules = free(path.removesuffix(".json"), "rules", ".toml")
        fix = (shell("ckpttool", "diff", path, *model.words, "--suggest", rules), *migrates(ruled, rules).fix)
    notes = (*ruled.notes, *([INFERRED] if ruled.rules else []))
    optimizer = ("--optimizer", model.optimizer) if isinstance(model.optimizer, str) else ()
    if shifted and not fix:
        words = (
            "--model",
            path,
            "--to-model",
            model.words[1],
            *(("--to-optimizer", optimizer[1]) if optimizer else ()),
        )
        fix = (shell("ckpttool", "remap", CKPT, *words, "-o", free(CKPT, "migrated", ".pt")),)
    elif shifted:
        asked = shell("ckpttool", "diff", free(CKPT, "renamed", ".pt"), *model.words, *optimizer)
        notes = (*notes, f"{_BOTH}: {asked}")
    return replace(diff, rules=ruled.rules, fix=fix, notes=(*notes, *untried(fix)))


def migrates(diff: Diff, rules: str) -> Diff:
    """The diff with the command that carries out its rules, which are in the file `rules`."""
    return replace(diff, fix=by_file(replace(diff, left=CKPT), rules).fix)


def _of_keys(diff: Diff) -> Diff:
    """The diff of the keys in a state dict alone, for which there are rules."""
    return replace(diff, entries=tuple(e for e in diff.entries if e.status != "transformed" and is_of_keys(e)))
