"""Suggest the commands that fix a diff, and say why if there are none."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import ExtraEntry, Section, TensorEntry
from ckpttool.core.codes import CODES
from ckpttool.core.errors import CkptError
from ckpttool.core.optimizer_state import FQN as FQN_KEYS
from ckpttool.core.text import Info, Note, plural, shell, some
from ckpttool.diffing.adapter import adapter_alone
from ckpttool.diffing.causes import OBJECTS, Code
from ckpttool.diffing.checkpoints import is_program, is_written_program, program_and_weights
from ckpttool.diffing.names import compare_with_code, renamable
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.result import HARMLESS, Diff, Entry, Fix, Remedy, Unfixed
from ckpttool.diffing.sections import without_segment
from ckpttool.fixes.candidates import Candidate, own_keys, to_compare, to_load, to_load_model
from ckpttool.fixes.rules_file import by_file, renamed, suggested, with_file
from ckpttool.fixes.trial import Question, Trial, model_path, try_remap, try_swap
from ckpttool.formats.registry import format_of
from ckpttool.formats.remarks import one_rank
from ckpttool.naming.wrappers import canonical_keys
from ckpttool.operands.checkpoint import model_section, open_operand, split
from ckpttool.operands.model import ModelOperand, read_names, saved_by
from ckpttool.operands.output import PLACEHOLDERS, command, free, outputs
from ckpttool.remapping import run as remap
from ckpttool.remapping.options import RemapOptions
from ckpttool.swap.swap import Misfit, SwapOptions

CKPT = "CKPT"

PART = Note("the suggested command fixes only some of the differences", "partial-fix")
INFERRED = Note(
    "the suggested rules are inferred from names and shapes; check the values", "inferred-fix"
)
DROPPED = Info(
    "--drop leaves out second names only: their values are in the output under another name",
    "drops-names",
)
OWN_NAMES = Info(
    "swap-weights gives the program all of the weights; the program keeps its names",
    "program-names",
)
FOREIGN = (
    "no fix is suggested because the new model does not have these keys, and their values"
    " would be lost"
)
NO_REMAP = Note(
    "no remap makes this state fit: load the model only, and start the optimizer from scratch",
    "no-fix",
)
_THEN_OPTIMIZER = "no rule reorders the state of an optimizer: rename the keys first, then run"
_FEW = 3
_RULES = re.compile(r"\brules?\b")  # in a command or in Python
_WORD = re.compile(r"[\w.]+")  # of a Python call


class Fixes(NamedTuple):
    """Commands, and notes on them. `is_partial`: they leave some of the differences, those in
    `unfixed`.
    """

    commands: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_partial: bool = False
    is_inferred: bool = False
    unfixed: tuple[Unfixed, ...] = ()

    def added_to(self, diff: Diff) -> Diff:
        """Return the diff with the commands, and all notes on them."""
        words: set[str] = set()
        for line in self.commands:
            words.update(shlex.split(line) if line.startswith("ckpttool ") else _WORD.findall(line))
        unknown = [name for name in PLACEHOLDERS if name in words]
        fix = []
        for line in self.commands:
            tried = words.isdisjoint(unknown)
            is_all = not (self.is_partial or self.unfixed)
            complete = tried and is_all and (line.complete if isinstance(line, Fix) else True)
            options = (
                line.options if is_all and not self.is_inferred and isinstance(line, Fix) else None
            )
            source = line.source if options is not None and isinstance(line, Fix) else ""
            fix.append(Fix(line, complete=complete, tried=tried, options=options, source=source))
        notes = [
            *diff.notes,
            *[PART] * self.is_partial,
            *[INFERRED] * self.is_inferred,
            *self.notes,
        ]
        if unknown:
            notes.append(
                Info(f"not tried, because the result depends on {' and '.join(unknown)}", "untried")
            )
        return replace(diff, fix=tuple(fix), notes=tuple(notes), unfixed=self.unfixed)


def answered(question: Question, suggests: bool = False) -> Diff:
    """Return the diff with fixes. `suggests`: also give the rules to a model's keys if no command
    needs their file.
    """
    left, right, model, diff = question.left, question.right, question.model, question.diff
    fixes = _fixes(question)
    if fixes.unfixed and question.parts:
        assert left is not None
        prefix = question.parts[0]
        one = RemapOptions(select=prefix, out=next(outputs(left.source, prefix.rpartition(".")[2])))
        several = len(question.parts) > 1
        which = f"names of right below each of {', '.join(question.parts)}; to take one"
        what = which if several else f"the names and shapes of right below {prefix}; to take them"
        note = Note(f"left has {what}: {command('remap', (left.source,), one)}", "several-parts")
        return fixes._replace(notes=(*fixes.notes, note)).added_to(replace(diff, inferred=None))
    if left is not None and right is not None:
        values = question.options.comparison is not None
        rules = (
            suggested(diff.entries, diff.inferred, left, right, values)
            if values
            else question.rules
        )
        if rules is None or diff.inferred is None:
            return fixes.added_to(diff)
        trial = None
        if (
            rules.few is None
            and "pt2" not in (left.format, right.format)
            and (not fixes.commands or fixes.is_partial)
        ):
            trial = _by_rules(question, rules.text())
        if trial is not None:
            commands = with_file(
                left.source, right.source, *["--values"] * values, options=_printed(trial)
            )
            unfixed = _unfixed(question, trial)
            is_partial = bool(rules.undone) or not trial.after.identical
            advice = () if rules.undone else tuple(filter(None, map(_advice, unfixed)))
            fixes = Fixes(commands, advice, is_partial, bool(diff.inferred.pairs), unfixed)
        if suggests or not fixes.commands or any(map(_RULES.search, fixes.commands)):
            fixes = fixes._replace(notes=(*fixes.notes, *rules.undone))
        rules_options = None if trial is None else _printed(trial)
        return replace(fixes.added_to(diff), rules=rules.text(), rules_options=rules_options)
    if left is None or model is None or not left.state_dicts or is_written_program(left):
        return fixes.added_to(diff)
    rules = question.rules if suggests or not fixes.commands or fixes.is_partial else None
    if rules is None:
        return fixes.added_to(diff)
    about_optimizer = diff.remedy is not None or question.options.optimizer is not None
    if not suggests and (about_optimizer or left.in_memory):
        return fixes.added_to(diff)
    trial = None if about_optimizer else _by_rules(question, rules.text())
    if trial is None and suggests:
        notes = (*fixes.notes, *rules.undone) if rules.undone else ()
        return replace(Fixes(fixes.commands, notes, False, True).added_to(diff), rules=rules.text())
    if trial is None or (
        fixes.commands
        and not suggests
        and not _fixes_more(_unfixed(question, trial), fixes.unfixed)
    ):
        return fixes.added_to(diff)
    to_file, line = with_file(left.source, *model.words, options=_printed(trial))
    fix = Fix(line, complete=trial.after.identical, options=trial.options)
    by_rules = Fixes((to_file, fix), is_inferred=True)
    if not trial.after.identical or rules.undone:
        unfixed = _unfixed(question, trial)
        notes = (*filter(None, map(_advice, unfixed)), *rules.undone)
        by_rules = Fixes((to_file, fix), notes, True, True, unfixed)
    answer = by_rules.added_to(diff)
    return (
        replace(answer, rules=rules.text(), rules_options=_printed(trial)) if suggests else answer
    )


def unpacked(question: Question) -> Diff:
    """Return the diff of a pickled module or a list that fits, with the command that writes a state
    dict.

    A list has no buffers: the output does not have them either.
    """
    options = RemapOptions(**question.model_options, to="serialized")
    trial = try_remap(question, options, "serialized")
    if trial is None:
        return question.diff
    differing = [entry for entry in trial.after.entries if trial.after.is_difference(entry)]
    if differing and all(entry.status == "missing" for entry in differing):
        trial = replace(trial, after=question.diff)
    return Fixes((trial.fix,)).added_to(question.diff)


def _fixes_more(unfixed: Sequence[Unfixed], other: Sequence[Unfixed]) -> bool:
    """Return True if fewer keys are left than by the other command."""
    return sum(len(left.keys) for left in unfixed) < sum(len(left.keys) for left in other)


def _by_rules(question: Question, rules: str) -> Trial | None:
    """Return the remap by inferred rules; for a model only if it fixes half of the differences or
    more.

    If the rules make other parameters, the optimizer in the file needs their order from the model
    that loads the output, or their names.
    """
    asked, plain = question.options, RemapOptions(rules=rules)
    if question.right is not None:
        return try_remap(question, plain, "renamed") or try_remap(
            question, replace(plain, optimizer_keys=FQN_KEYS), "renamed"
        )
    most = question.remaining(question.diff) // 2 + 1
    with_model = replace(plain, to_model=asked.model, materialize=asked.materialize)
    return try_remap(question, plain, "renamed", most) or try_remap(
        question, with_model, "renamed", most
    )


def _printed(trial: Trial) -> RemapOptions:
    """Return the options of a remap by a rules file, but for the rules and the output."""
    assert isinstance(trial.options, RemapOptions)
    return replace(trial.options, rules=None, out=None)


def _fixes(question: Question) -> Fixes:
    """Return the commands that fix the diff, each tried."""
    left, diff = question.left, question.diff
    if diff.remedy is not None:
        return _optimizer_fixes(question, diff.remedy)
    if left is None:
        return _model_fixes(question)
    if not left.state_dicts:
        return Fixes()
    # the state fits, the model may not
    if question.options.optimizer is not None and question.right is None:
        if diff.identical:
            return Fixes()
        tried = (try_remap(question, options, word) for word, options in to_load_model(question))
        complete = next((fix for fix in tried if fix is not None and fix.after.identical), None)
        return Fixes() if complete is None else Fixes((complete.fix,))
    has_program = question.right is not None and is_program(left, question.right)
    swap, swap_notes = _swap_fix(question) if has_program else (None, [])
    if swap is not None and swap.after.identical:
        return Fixes((swap.fix,))
    best = _best_remap(question)
    if best is None or not best.after.identical or best.infers:
        best = _selected(question) or best
    drops, infers = best is not None and best.drops, best is not None and best.infers
    if swap is not None and drops:
        best, drops, infers = None, False, False  # the program takes what only a remap would drop
    commands = [trial.fix for trial in (swap, best) if trial is not None]
    with_model: tuple[str, ...] = ()
    is_whole = best is not None and best.after.identical and not infers
    if not commands or (has_program and not is_whole):  # the program's own model knows better
        with_model = _commands_with_a_model(question, has_program)
        if with_model and swap is None and not infers:
            commands = []
    notes = [*swap_notes, *[OWN_NAMES] * (swap is not None), *[DROPPED] * drops]
    if best is not None and best.code:
        text = f"the command leaves out {some(best.code)}, which would run code when it is loaded"
        notes.append(Info(text, "drops-code"))
    if (
        best is not None
        and isinstance(best.options, RemapOptions)
        and best.options.select
        and best.left_out
    ):
        count = plural(len(best.left_out), "entry")
        text = (
            f"the command leaves out {count} of left that the model does not have:"
            f" {some(best.left_out)}"
        )
        notes.append(Info(text, "leaves-keys"))
    is_partial, unfixed = False, tuple[Unfixed, ...]()
    if not with_model and swap is None:
        is_partial = best is not None and not best.after.identical
        if not one_rank(left):  # else a note of the diff says everything
            unfixed = _unfixed(question, best)
            if best is not None or adapter_alone(left, model_section(left)) is None:
                notes += filter(None, map(_advice, unfixed))
    return Fixes((*with_model, *commands), tuple(notes), is_partial, infers, unfixed)


def _best_remap(question: Question) -> Trial | None:
    """Return the first remap after which the two are the same, or else the remap that leaves the
    fewest differences.
    """
    left = question.left
    assert left is not None
    if one_rank(left):
        return None  # no command has what the other ranks hold
    differing = {status for entry in question.diff.entries for status in entry.statuses} - {"same"}
    not_by_names = {"shape", "dtype"} | ({"value"} if question.right is not None else set())
    if differing and differing <= not_by_names and not format_of(left).holds.rank_parts:
        return None
    if question.parts:
        return None
    best, fewest = None, question.remaining(question.diff)
    for word, options in to_load(question) if question.right is None else to_compare(question):
        fix = try_remap(question, options, word, fewest)
        # only values are left
        if fix is not None and (fix.after.identical or question.different_values(fix.after)):
            return fix
        if fix is not None:
            best, fewest = fix, question.remaining(fix.after)
    return best and (_with_rules_after(question, best, fewest) or best)


def _with_rules_after(question: Question, best: Trial, most: int) -> Trial | None:
    """Return the same remap with a few inferred renames of the names that it leads to, if that
    fixes everything.

    The names of wrapped keys are compared best without the wrappers, which `best` removes.
    """
    options, left = best.options, question.left
    if (
        not isinstance(options, RemapOptions)
        or options.has_rules
        or left is None
        or question.model is None
    ):
        return None
    options = replace(options, out=None, partial=False)
    try:
        model = None if options.model is None else question.model.with_optimizer(options.optimizer)
        read = replace(options, model=model)
        unwrapped = remap.plan_remap(left, read, model, remap.loading_model(read, model)).result
        rules = replace(question, left=unwrapped, diff=best.after).rules
    except CkptError:
        return None
    few = None if rules is None else rules.few
    if few is None or not few.rule or few.drop:
        return None
    trial = try_remap(question, replace(options, rule=few.rule), "renamed", most)
    return trial if trial is not None and trial.after.identical else None


def _selected(question: Question) -> Trial | None:
    """Return the remap that takes the model's keys from below the only prefix under which left has
    all of them.

    What is not below the prefix is left out: the model has no place for it. If other sections stand
    against that, such as an optimizer of all parameters, the section of the model is taken alone.
    """
    left = question.left
    if (
        left is None
        or question.right is not None
        or question.model is None
        or question.parts
        or one_rank(left)
    ):
        return None
    sources = [question]
    path = model_path(left)
    if path and split(left.source)[1] is None and not left.in_memory:
        sources.append(replace(question, left=open_operand(left.part(path)), opened=None))
    for prefix in dict.fromkeys(
        found[0] for found in question.prefixes if len(found) == 1 and found[0]
    ):
        for number, asked in enumerate(sources):
            for options in (
                RemapOptions(select=prefix),
                RemapOptions(select=prefix, to="serialized"),
            ):
                trial = try_remap(asked, options, prefix.rpartition(".")[2], loses_keys=True)
                if trial is not None and trial.after.identical and not trial.stateless:
                    return replace(trial, part=number > 0)
    return None


def _swap_fix(question: Question) -> tuple[Trial | None, list[str]]:
    """Return the swap that works if one of two checkpoints is a program; else why none does, if
    that is final.
    """
    options = SwapOptions(**question.model_options)
    fix = try_swap(question, options)
    for _ in range(2):  # constants, and then another dtype
        if isinstance(fix, Misfit) and fix.advice in ("constants", "cast"):
            constants = options.constants or fix.advice == "constants"
            options = replace(options, constants=constants, cast=fix.advice == "cast")
            fix = try_swap(question, options)
    if isinstance(fix, Trial):
        return fix, []
    if question.options.model is None:
        return None, []
    problems = "; ".join(map(str, fix.problems[:_FEW]))
    if len(fix.problems) > _FEW:
        problems += f"; and {plural(len(fix.problems) - _FEW, 'problem')} more"
    hint = f"; {fix.hint}" if isinstance(fix, Misfit) and fix.advice == "values" else ""
    text = (
        f"swap-weights would be refused: {fix.message} ({problems}){hint}"
        if problems
        else fix.message
    )
    return None, [Note(text, "no-fix")]


# Differences that no command fixes


# Code -> what the keys are; its row says what to do.
_UNFIXED: dict[str, tuple[str, str]] = {
    "quantized": ("key", "of quantized weights"),
    "missing": ("key", "missing from left"),
    "shape": ("tensor", "of a different shape, which no rename fixes"),
    "dtype": ("tensor", "of a different dtype"),
    "value": ("tensor", "with different values, which no rename fixes"),
    "unread-value": ("tensor", "with values that were not compared"),
    "tied-value": ("tensor", "with two values under its names"),
    "lost-value": ("key", "whose values loading does not read"),
    "unexpected": ("key", "not in right"),
    "renamed": ("key", "under another name"),
    "transformed": ("key", "computed when the model is saved"),
    "alias": ("second name", "on one side only"),
    "part": ("key", "of parameters that one side computes from others"),
    "object": ("object", "with different content, which no rename fixes"),
    "rotary-order": ("tensor", "with rows in the other rotary-embedding order"),
    "row-order": ("tensor", "with rows in a different order"),
    "transposed": ("tensor", "transposed"),
    "moved": ("tensor", "with values that right has under other names"),
    "placeholder": ("tensor", "without values"),
    "kind": ("tensor", "of a different kind"),
}


def _unfixed(question: Question, best: Trial | None) -> tuple[Unfixed, ...]:
    """Return the differences that are left after the best fix, if there is one, by their codes."""
    entries: Sequence[Entry] = question.diff.entries
    if best is not None:  # a rename does not change values that differ
        names = () if best.after.identical else best.after.entries
        entries = (*names, *question.different_values(question.diff))
    accepted = (HARMLESS | question.diff.harmless) - {"alias"}
    keys: dict[str, list[str]] = {}
    for entry in entries:
        if not entry.is_one_of(accepted):
            keys.setdefault(_code(entry), []).append((entry.right or entry.left or ("",))[0])
    codes = [*_UNFIXED, *keys]
    return tuple(Unfixed(code, tuple(keys[code])) for code in dict.fromkeys(codes) if code in keys)


def _advice(unfixed: Unfixed) -> Note | None:
    """Return the sentence about keys that are left, None if there is nothing to do about them."""
    if unfixed.code not in _UNFIXED:
        return None
    noun, what = _UNFIXED[unfixed.code]
    advice = CODES[unfixed.code].fix.rstrip(".")
    text = (
        f"{plural(len(unfixed.keys), noun)} {what} ({some(unfixed.keys, _FEW)}):"
        f" {advice[0].lower()}{advice[1:]}"
    )
    return Note(text, unfixed.code)


def _code(entry: Entry) -> str:
    """Return the code that says best what could fix the entry."""
    if (
        entry.status in ("shape", "dtype", "value")
        and entry.cause is not None
        and entry.cause.code in OBJECTS
    ):
        return "object"
    if entry.has(Code.QUANTIZED):
        return "quantized"
    codes = () if entry.cause is None else entry.cause.codes
    return next((code for code in reversed(codes) if code in _UNFIXED), entry.status)


# Two checkpoints whose relation only the model's code could tell


def _commands_with_a_model(question: Question, has_program: bool) -> tuple[str, ...]:
    """Return commands with the placeholder MODEL if all differences look like the work of a hook,
    or of a rank.

    The weights of a program may be in wrappers too.
    """
    if question.model is not None:
        return ()
    (left, right), diff = question.two, question.diff
    source = left.source
    mine, theirs = model_section(left), model_section(right)
    statuses = {entry.status for entry in diff.entries}
    # If left lacks only second names of tensors that it has, the model ties them.
    lacks_second_names = any(entry.status == "alias" and not entry.left for entry in diff.entries)
    if format_of(left).holds.rank_parts or (
        lacks_second_names and statuses <= {"same", "alias", "extra_state"}
    ):
        to = "serialized"
    elif statuses - ({"renamed"} if has_program else set()) <= {
        "same",
        "alias",
        "extra_state",
        "missing",
        "unexpected",
    }:
        only_left = [
            key for entry in diff.entries if entry.status == "unexpected" for key in entry.left
        ]
        only_right = [
            key for entry in diff.entries if entry.status == "missing" for key in entry.right
        ]
        if not only_left or len(only_left) != len(only_right):
            return ()
        if _are_shortened(mine, only_left, theirs, only_right):
            to = "exported"
        elif _are_shortened(theirs, only_right, mine, only_left):
            to = "serialized"
        else:
            return ()
        if has_program:
            program, weights = program_and_weights(left, right)
            swap = SwapOptions(model="MODEL", out=next(outputs(program.source, "swapped")))
            return (command("swap-weights", (program.source, weights.source), swap),)
    else:
        return ()
    is_tied = bool(mine.aliases() or theirs.aliases())  # a torch file holds each of the names
    *_, torch_file = names = list(outputs(source, to))
    options = RemapOptions(model="MODEL", to=to, out=torch_file if is_tied else names[0])
    return (command("remap", (source,), options),)


def _are_shortened(short: Section, shorter: list[str], long: Section, longer: list[str]) -> bool:
    """Return True if each shorter key is exactly one longer key without a segment, with the same
    dtype and shape.

    Segments of wrappers do not count.
    """
    have, want = _outlines(short, shorter), _outlines(long, longer)
    others = set()
    for key, outline in want.items():
        found = without_segment(key, have)
        if found is None or found[0] in others or have[found[0]] != outline:
            return False
        others.add(found[0])
    return True


def _outlines(section: Section, keys: list[str]) -> dict[str, object]:
    entries, names = section.by_key(), canonical_keys(section.by_key())
    return {names.get(key, key): _outline(entries.get(key)) for key in keys}


def _outline(entry: TensorEntry | ExtraEntry | None) -> object:
    return (entry.dtype, entry.shape) if isinstance(entry, TensorEntry) else None


# A model alone, and a names file


def _model_fixes(question: Question) -> Fixes:
    """Return the commands that bring what the model saves to its runtime names; the checkpoint is
    not known.
    """
    assert question.model is not None
    names = question.model.names()
    options = RemapOptions(model=names, to="exported", partial=True)
    try:
        done = remap.run(saved_by(names), options, may_copy=True)
    except CkptError as error:
        problems = "; ".join(map(str, error.problems[:_FEW]))
        reason = f"{error.message} ({problems})"
        text = f"no command brings this model's checkpoints to its runtime names: {reason}"
        return Fixes(notes=(Note(text, "no-fix"),))
    keys = done.result.section("").by_key()
    lost = [
        t.fqn for t in names.runtime if t.persistent and t.alias_of is None and t.fqn not in keys
    ]
    notes = []
    if lost:
        count = f"{plural(len(lost), 'tensor')} {'is' if len(lost) == 1 else 'are'}"
        text = (
            f"{count} not in any key that state_dict() writes ({some(lost, _FEW)}), so no command"
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
        RemapOptions(**model, to="exported", partial=bool(done.missing), out="OUT.pt"),
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


# Saved optimizers


def _optimizer_fixes(question: Question, remedy: Remedy) -> Fixes:
    """Return the command that fixes the state: tried, unless it names what only the user knows;
    else a note.
    """
    assert question.left is not None
    if remedy.foreign_keys:
        return Fixes(notes=(Note(f"{FOREIGN}: {some(remedy.foreign_keys)}", "no-fix"),))
    if remedy.way != "drop_state":
        path, optimizer_path = split(question.left.source)
        file = question.left if optimizer_path is None else open_operand(path)
        word, options = optimizer_remap(question, remedy)
        if has_placeholder(options):
            return Fixes(
                (command("remap", (path,), replace(options, out=next(outputs(path, word)))),)
            )
        opened = question.opened if optimizer_path is None else None
        asked = replace(question, left=file, opened=opened, optimizer_path=optimizer_path)
        most = question.remaining(question.diff)
        fix = try_remap(asked, options, word, most) or try_remap(
            asked, options, word, most, loses_state=True
        )
        is_partial = fix is not None and not fix.after.identical and not fix.stateless
        # also fix the keys of the model in the file
        if is_partial and file.state_dicts and options.model is not None:
            tried = (try_remap(asked, one, word, most) for one in own_keys(file, options))
            fix = next((one for one in tried if one is not None and one.after.identical), fix)
        if fix is not None:
            left_out = (
                f"the command leaves out the state of {some(fix.stateless)}, which the optimizer"
                " of right does not have"
            )
            return Fixes((fix.fix,), (Note(left_out, "leaves-state"),) if fix.stateless else ())
    return Fixes(notes=(NO_REMAP,))


def has_placeholder(options: RemapOptions) -> bool:
    """Return True if an option names what only the user knows."""
    return any(isinstance(value, str) and value in PLACEHOLDERS for value in vars(options).values())


def optimizer_remap(question: Question, remedy: Remedy) -> Candidate:
    """Return the remap of a remedy, with placeholders for what the question does not name."""
    asked, form, left = question.options, remedy.form, question.left
    optimizer = None if question.model is None else question.model.optimizer
    model: dict[str, Any] = {"model": "MODEL"} if asked.model is None else question.model_options
    if remedy.way == "by_name":
        return "ordered", RemapOptions(**model, optimizer=optimizer, optimizer_keys=form)
    if remedy.way == "regroup":
        return "mapped", RemapOptions(**model, to_optimizer=optimizer)
    if remedy.way == "old_optimizer":
        return "mapped", RemapOptions(
            **model, optimizer="OLD_OPTIMIZER", to_optimizer=optimizer or "OPTIMIZER"
        )
    if remedy.way == "like_right" and any(
        e.has(Code.KEY_ORDER, Code.DOUBT) for e in question.diff.entries
    ):
        # the files' models have their parameters in different orders, so two models are needed
        options = RemapOptions(
            model="OLD",
            to_model=asked.model or "MODEL",
            materialize=asked.materialize,
            to_optimizer=optimizer or "OPTIMIZER",
            optimizer_keys=form,
        )
        return form or "ordered", options
    if remedy.way == "like_right":
        options = RemapOptions(**model, to_optimizer=optimizer or "OPTIMIZER", optimizer_keys=form)
        return form or "ordered", options
    if remedy.way == "keys_by_model":
        return form or "", RemapOptions(**model, optimizer=optimizer, optimizer_keys=form)
    if remedy.way == "keys":
        return form or "", RemapOptions(optimizer_keys=form)
    old_optimizer = {True: optimizer, False: "OLD_OPTIMIZER", None: None}[remedy.same_groups]
    # the model has values that no tensor of the file can become, whatever its name
    lacks_values = False
    if question.model is not None and left is not None and left.state_dicts:
        largest = max(left.state_dicts, key=lambda section: len(section.keys))
        in_file = Counter(entry.shape for entry in largest.tensors)
        in_model = Counter(
            key.shape for key in question.model.names().serialized if key.shape is not None
        )
        missing, left_over = (in_model - in_file).elements(), (in_file - in_model).elements()
        lacks_values = sum(map(math.prod, missing)) > sum(map(math.prod, left_over))
    return "mapped", RemapOptions(
        model="OLD",
        optimizer=None if optimizer is None else old_optimizer,
        to_model=asked.model,
        materialize=asked.materialize,
        to_optimizer=optimizer,
        partial=lacks_values,
    )
