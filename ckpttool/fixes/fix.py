"""`fix`: write a checkpoint with the fix that `diff` suggests."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckpttool.core.codes import CODES
from ckpttool.core.errors import CkptError, Problem, Refused, same_problem
from ckpttool.core.options import (
    EditOptions,
    FixOptions,
    OutputOptions,
    expand_options,
    keywords_of,
)
from ckpttool.core.text import Note, code_of
from ckpttool.diffing.options import DiffOptions
from ckpttool.fixes.diff import diff_with_fixes
from ckpttool.formats.fit import holds_tensors_only
from ckpttool.kinds import lists, parts
from ckpttool.operands.checkpoint import Ckpt, open_checkpoint
from ckpttool.operands.model import operand_of
from ckpttool.operands.output import command, target_for
from ckpttool.remapping.options import ConvertOptions, RemapOptions
from ckpttool.remapping.run import convert, copy_by, remap_by

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.diffing.result import Diff, Fix
    from ckpttool.io.progress import Progress
    from ckpttool.keywords import FixKeywords
    from ckpttool.remapping.result import Remap


@expand_options(FixOptions)
def fix(
    ckpt: Ckpt,
    out: str | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[FixKeywords],
) -> Remap:
    """Write the checkpoint as `model` loads it, and `optimizer` if it is named: what `diff`
    suggests.

    A checkpoint that already fits is copied. Only a fix that was tried, after which nothing
    differs, and that guesses no name is applied.

    Args:
        ckpt: Anything that `open_checkpoint` takes.
        out: The path to write; nothing is written without it.
        progress: As for `remap`.
        **options: `model` and `optimizer` will load the checkpoint; the others are the options of
            `remap` about writing.

    Returns:
        What `remap` returns; `loads_into` is the model.

    Raises:
        Refused: No command fixes it completely; the reasons are in the problems.
        CkptError: Something cannot be read or written.

    Example::

        fixed = ckpttool.fix("wrapped.pt", "fixed.pt", model="model.py:build")
        print(fixed.loads_into, fixed.written)
    """
    chosen = FixOptions(out=out, **options)
    if chosen.model is None:
        raise CkptError("a fix is for a model", hint="pass --model MODEL")
    diff_options = DiffOptions(
        model=chosen.model, materialize=chosen.materialize, optimizer=chosen.optimizer
    )
    model = operand_of(diff_options)
    assert model is not None
    answer = diff_with_fixes(ckpt, None, diff_options, model=model)
    written = _fields_of(EditOptions, chosen)
    kinds = answer.left_kinds
    if answer.identical and not answer.fix and lists.NAME not in kinds:
        if parts.NAME in kinds:  # no format has a place for them
            request = RemapOptions(model=chosen.model, to="serialized", **written)
            result = remap_by(ckpt, request, progress, model)
        else:
            result = copy_by(ckpt, RemapOptions(**written), progress, model)
        by_name = _notes_of(answer, "optimizer-order")
        return replace(result, notes=(*result.notes, *by_name), loads_into=model.called)
    trial = applicable(answer, command("diff", (answer.left,), diff_options))
    if isinstance(trial.options, ConvertOptions):
        result = _converted(ckpt, trial.options, chosen, progress)
        return replace(result, loads_into=model.called)
    request = replace(trial.options, **written)
    try:
        read_already = None if request.model is None else model.with_optimizer(request.optimizer)
        result = remap_by(trial.source or ckpt, request, progress, read_already)
    except CkptError as error:
        line = command("remap", (trial.source or answer.left,), request)
        error.hint = _hint_on_options(error.hint, line)
        raise
    on_fix = {code for code, row in CODES.items() if row.kind == "fix"} - {"leaves-keys"}
    notes = (*result.notes, *_notes_of(answer, *on_fix))
    return replace(result, notes=notes, loads_into=model.called)


def _notes_of(answer: Diff, *codes: str) -> list[Note]:
    """Return the notes of the diff that have one of these codes."""
    notes = []
    for note in answer.notes:
        if isinstance(note, Note) and note.code in codes:
            notes.append(note.named(*answer.names))
    return notes


def _hint_on_options(hint: str, line: str) -> str:
    """Return the hint; if it names an option that `fix` does not have, with the command that has
    it.
    """
    flags = {f"--{field.name.replace('_', '-')}" for field in fields(FixOptions)}
    flags_in_hint = re.findall(r"--[a-z-]+", hint.partition("ckpttool ")[0])
    if flags.issuperset(flags_in_hint):
        return hint
    return f"{hint}; `fix` has no such option, add it to: {line}"


def _converted(
    ckpt: Ckpt, options: ConvertOptions, chosen: FixOptions, progress: Progress | None
) -> Remap:
    """Write the checkpoint with another dtype, or with the second names that it records. Raise
    `Refused` if it must be done in place, or if OUT has no place for second names.
    """
    if chosen.in_place and options.dtype is not None:
        raise Refused(
            f"{options.dtype} values do not fit where the tensors are", hint="write a file: -o OUT"
        )
    request = replace(options, **_fields_of(OutputOptions, chosen))
    if options.dtype is None:
        out = chosen.out or str(ckpt)
        if chosen.in_place or holds_tensors_only(target_for(out, open_checkpoint(ckpt)).format):
            raise Refused(
                f"{out} has no place for two names of one tensor",
                hint="choose an output that ends in .pt",
            )
    return convert(ckpt, progress=progress, **keywords_of(request))


def _fields_of(options: type, chosen: FixOptions) -> dict[str, Any]:
    """Return the values that are chosen for these options."""
    return {field.name: getattr(chosen, field.name) for field in fields(options)}


def applicable(answer: Diff, shows: str, *, casts: bool = True) -> Fix:
    """Return the fix that needs nobody to look at it: it was tried, nothing differs after it, and
    it guesses nothing.

    Raise `Refused`, with the reasons, if there is none. `shows` is the command that prints the
    diff. `casts`: it may convert dtypes.
    """
    for fix in answer.fix:
        if fix.options is not None and (casts or isinstance(fix.options, RemapOptions)):
            return fix
    notes: dict[str, list[str]] = {}  # by code
    for note in answer.notes:
        notes.setdefault(code_of(note), []).append(note)
    if "inferred-fix" in notes and answer.fix and answer.fix[-1].complete:
        message = f"{answer.left} fits only by renames that are guessed from names and shapes"
        raise Refused(message, hint=f"if they are right, run {'; '.join(answer.fix)}")
    if "several-parts" in notes:
        note = notes["several-parts"][0]
        hint = note.named(*answer.names) if isinstance(note, Note) else note
        raise Refused(f"{answer.left} has the names of the model several times", hint=hint)
    message, problems = f"no command fixes {answer.left} completely", _unfixed_problems(answer)
    if "optimizer-class" in notes:
        message = f"{message}: {notes['optimizer-class'][0]}"
    elif not problems:
        problems = answer.problems(answer.names)
    hint = f"{shows} shows what differs and why"
    if answer.fix:
        hint = f"{shows} shows what differs, why, and what fixes a part of it"
    if answer.identical:
        hint = f"{shows} shows a command that writes the others, and what to do about these"
    hint = "; ".join((*notes.get("no-fix", ()), hint))
    if "old-code" in notes and answer.fix:
        lines = " and ".join(f"`{line}`" for line in answer.fix)
        hint = f"run {lines}, where {notes['old-code'][0]}; {hint}"
    raise Refused(message, hint=hint, problems=problems)


def _unfixed_problems(answer: Diff) -> list[Problem]:
    """Return the differences that no command fixes, or all if that is unknown."""
    keys = set(chain(*(unfixed.keys for unfixed in answer.unfixed)))
    differences = list(filter(answer.is_difference, answer.entries))
    left_over = [entry for entry in differences if keys.intersection((*entry.left, *entry.right))]
    problems = []
    for entry in left_over or differences:
        key = (*entry.right, *entry.left)[0]
        problems.append(entry.problem(key, answer.names))
    if answer.identical:  # a list of all parameters, which has no buffers
        for unfixed in answer.unfixed:
            problems += same_problem(unfixed.code, unfixed.keys)
    return problems
