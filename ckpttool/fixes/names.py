"""A model alone, and a file of its names: no checkpoint is known."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.errors import CkptError
from ckpttool.core.text import Note, plural, shell, some
from ckpttool.diffing.names_file import compare_with_code, renamable
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.result import Diff
from ckpttool.fixes.commands import FEW, Fixes
from ckpttool.fixes.rules_file import by_file, renamed, suggested
from ckpttool.fixes.trial import DiffQuestion
from ckpttool.operands.model import ModelOperand, read_names, saved_by
from ckpttool.operands.output import command, free
from ckpttool.remapping import run as remap
from ckpttool.remapping.options import RemapOptions
from ckpttool.swap.swap import SwapOptions

CKPT = "CKPT"

_THEN_OPTIMIZER = "no rule reorders the state of an optimizer: rename the keys first, then run"


def model_fixes(question: DiffQuestion) -> Fixes:
    """Return the commands that bring what the model saves to its runtime names; the checkpoint is
    not known.
    """
    assert question.model is not None
    names = question.model.names()
    options = RemapOptions(model=names, to="exported", partial=True)
    try:
        outcome = remap.run(saved_by(names), options, may_copy=True)
    except CkptError as error:
        problems = "; ".join(map(str, error.problems[:FEW]))
        reason = f"{error.message} ({problems})"
        text = f"no command brings this model's checkpoints to its runtime names: {reason}"
        return Fixes(notes=(Note(text, "no-fix"),))
    keys = outcome.result.section("").by_key()
    lost = [
        t.fqn for t in names.runtime if t.persistent and t.alias_of is None and t.fqn not in keys
    ]
    notes = []
    if lost:
        count = f"{plural(len(lost), 'tensor')} {'is' if len(lost) == 1 else 'are'}"
        text = (
            f"{count} not in any key that state_dict() writes ({some(lost, FEW)}), so no command"
            " can restore them "
            "from a checkpoint of this model: save them in a hook, or fix the hook that removes"
            " them"
        )
        notes.append(Note(text, "not-saved"))
    if not any(entry.status in ("renamed", "transformed") for entry in question.diff.entries):
        return Fixes(notes=tuple(notes))
    model = question.model_options
    renamed = command(
        "remap",
        (CKPT,),
        RemapOptions(**model, to="exported", partial=bool(outcome.missing), out="OUT.pt"),
    )
    swap = command("swap-weights", ("PROGRAM.pt2", CKPT), SwapOptions(**model, out="OUT.pt2"))
    return Fixes((renamed,) if lost else (swap, renamed), tuple(notes))


def diff_names_file(path: str, model: ModelOperand | None, options: DiffOptions) -> Diff:
    """Compare the names file at `path` with the model's code, with commands that rename a
    checkpoint with old names.

    Raises `CkptError` if no model is named, or if the options ask for values.
    """
    if model is None:
        hint = f"{shell('ckpttool', 'diff', path)} --model MODEL"
        raise CkptError(f"{path} is a names file: name the model to compare it with", hint=hint)
    if options.comparison is not None:
        raise CkptError(f"{path} is a names file, which has no values", hint="remove --values")
    old = read_names(path)
    diff = compare_with_code(old, path, model)
    rules = suggested(
        renamable(diff.entries), diff.inferred, saved_by(old), saved_by(model.names())
    )
    commands: tuple[str, ...] = ()
    if rules is not None and rules.few is not None:
        commands = (renamed(CKPT, rules.few),)
    elif rules is not None:
        file = free(path.removesuffix(".json"), "rules", ".toml")
        commands = (
            shell("ckpttool", "diff", path, *model.words, "--suggest", file),
            by_file(CKPT, file, RemapOptions()),
        )
    notes = () if rules is None else rules.undone
    optimizer = model.optimizer if isinstance(model.optimizer, str) else None
    if any(entry.status == "order" for entry in diff.entries):
        if commands:
            words = [*model.words, *(["--optimizer", optimizer] if optimizer else [])]
            text = (
                f"{_THEN_OPTIMIZER}:"
                f" {shell('ckpttool', 'diff', free(CKPT, 'renamed', '.pt'), *words)}"
            )
            notes = (*notes, Note(text, "optimizer-order"))
        else:
            words = ["--model", path, "--to-model", model.words[1]]
            words += ["--to-optimizer", optimizer] if optimizer else []
            commands = (
                shell("ckpttool", "remap", CKPT, *words, "-o", free(CKPT, "migrated", ".pt")),
            )
    fixes = Fixes(commands, notes, bool(rules and rules.undone), rules is not None)
    return replace(fixes.added_to(diff), rules=None if rules is None else rules.text())
