"""A model alone, and a file of its names: no checkpoint is known."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.errors import CkptError
from ckpttool.core.tables import first_names
from ckpttool.core.text import CKPT, PROGRAM, Note, plural, shell, some
from ckpttool.diffing.names_file import compare_with_code, renamable
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.result import Diff, statuses_of
from ckpttool.fixes.commands import FEW, Fixes
from ckpttool.fixes.question import DiffQuestion
from ckpttool.fixes.rules_file import Rules, by_file, renamed, suggested
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.names_files import read_names, saved_by
from ckpttool.operands.output import command, free
from ckpttool.remapping import run as remap
from ckpttool.remapping.options import RemapOptions
from ckpttool.swap.options import SwapOptions


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
    persistent = [tensor for tensor in names.runtime if tensor.persistent]
    lost = [fqn for fqn in first_names(persistent) if fqn not in keys]
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
    if {"renamed", "transformed"}.isdisjoint(statuses_of(question.diff.entries)):
        return Fixes(notes=tuple(notes))
    model = question.model_options
    renamed = command(
        "remap",
        (CKPT,),
        RemapOptions(**model, to="exported", partial=bool(outcome.missing), out="OUT.pt"),
    )
    swap = command("swap-weights", (PROGRAM, CKPT), SwapOptions(**model, out="OUT.pt2"))
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
    fixes = _fixes_of_drift(diff, path, model, options, rules)
    if rules is None:
        return fixes.added_to(diff)
    rules_options = _options_with_rules(diff, path, model, options, rules)
    return replace(fixes.added_to(diff), rules=rules.text(), rules_options=rules_options)


def _fixes_of_drift(
    diff: Diff, path: str, model: ModelOperand, options: DiffOptions, rules: Rules | None
) -> Fixes:
    """Return the commands that bring a checkpoint with the names of the file `path` to the names
    that the model has now.
    """
    if rules is None:
        if not _has_other_order(diff):
            return Fixes()
        migration = replace(_migration(path, model, options), out=free(CKPT, "migrated", ".pt"))
        return Fixes((command("remap", (CKPT,), migration),))
    by_rules = _options_with_rules(diff, path, model, options, rules)
    if rules.few is not None:
        few = replace(by_rules, rule=rules.few.rule, drop=rules.few.drop)
        commands: tuple[str, ...] = (renamed(CKPT, few),)
    else:
        file = free(path.removesuffix(".json"), "rules", ".toml")
        words = [*model.words]
        if isinstance(options.optimizer, str):
            words += ["--optimizer", options.optimizer]
        show = shell("ckpttool", "diff", path, *words, "--suggest", file)
        commands = (show, by_file(CKPT, file, by_rules))
    return Fixes(commands, rules.undone, bool(rules.undone), is_inferred=True)


def _options_with_rules(
    diff: Diff, path: str, model: ModelOperand, options: DiffOptions, rules: Rules
) -> RemapOptions:
    """Return the options of a remap by the rules, but for these. If they split or join tensors, or
    if ids change, the state of an optimizer needs the names of both sides.
    """
    needs_names = rules.few is None or _has_other_order(diff)
    if rules.left_over or not needs_names:
        return RemapOptions()
    return replace(_migration(path, model, options), partial=bool(rules.remaining))


def _has_other_order(diff: Diff) -> bool:
    return "order" in statuses_of(diff.entries)


def _migration(path: str, model: ModelOperand, options: DiffOptions) -> RemapOptions:
    """Return the options that name the old names file and the new model."""
    return RemapOptions(
        model=path,
        to_model=model.model,
        materialize=options.materialize,
        to_optimizer=options.optimizer,
    )
