"""Compare two checkpoints, with everything in them besides the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry, Unreached
from ckpttool.core.errors import CkptError
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import GROUPS
from ckpttool.core.text import Info, Note, plural, some
from ckpttool.diffing.causes import FIELDS, SIDES, Cause, Code, Sides
from ckpttool.diffing.moved import explain_moved
from ckpttool.diffing.names import suggestions
from ckpttool.diffing.one_model import compare_through
from ckpttool.diffing.optimizer import (
    UNKNOWN_CLASS,
    SavedOptimizer,
    compare_optimizers,
    is_named,
    optimizer_alone,
)
from ckpttool.diffing.options import CompareOptions
from ckpttool.diffing.result import (
    EITHER_WAY,
    Diff,
    Entry,
    Remedy,
    kinds_by_side,
    only_left,
    only_right,
    outlines,
)
from ckpttool.diffing.sections import (
    Values,
    adapter_notes,
    compare,
    compare_pair,
    explain_computed,
    explain_quantized,
    hidden_segments,
    without_dtypes,
)
from ckpttool.distributed.job import Question, answers, current, only_first
from ckpttool.evaluate.compare import Difference, content_of_storage, same_objects
from ckpttool.formats.registry import MEMORY, format_of
from ckpttool.formats.remarks import one_rank
from ckpttool.naming.versions import Effect, other_versions_of
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand, as_read
from ckpttool.operands.output import command
from ckpttool.optimizers import forms


def checkpoints(
    left: Checkpoint,
    right: Checkpoint,
    model: ModelOperand | None,
    values: Values | None,
    options: CompareOptions,
    infers: bool,
) -> Diff:
    """Compare two checkpoints; if it `infers`, also find likely renames."""
    values = compare_on_ranks(values, partial(read_all_values, left, right, model))
    saved = _saved_optimizers(left, right)
    if saved is not None:
        return _optimizers(left, right, saved, model, values, options)
    mine, theirs, names = _models(left, right, model)
    entries = (
        compare(mine, theirs, values)
        if names is None
        else compare_through(names, mine, theirs, values)
    )
    entries = explain_quantized(
        explain_computed(explain_moved(entries, mine, theirs)), mine, theirs
    )
    entries = (*entries, *compare_outside(left, right, values))
    entries = without_dtypes(entries) if options.ignore_dtype else entries
    harmless = EITHER_WAY | ({"dtype"} if options.ignore_dtype else set())
    if names is not None and values is not None and is_program(left, right):
        harmless |= OTHER_NAMES
    hidden = () if names is not None else hidden_segments(entries)
    adapters = adapter_notes(mine.keys, theirs.keys, FIELDS)
    other_notes, compared = _compare_others(left, right, (mine, theirs), names, values, options)
    other_notes = [
        *_tie_notes(left, right, entries),
        *_metadata_notes(left, right),
        *other_notes,
    ]
    versions, failure = _compare_versions(left, right, (mine, theirs), names)
    operands = names_of(left, right)
    return Diff(
        left.source,
        right.source,
        identical=not failure and all(entry.is_one_of(harmless) for entry in entries),
        entries=entries,
        notes=(*one_rank(left), *one_rank(right), *versions, *hidden, *adapters, *other_notes),
        other_failure=failure.format(left=operands[0], right=operands[1]),
        inferred=suggestions(left, right, entries, values is not None)
        if infers and names is None
        else None,
        harmless=harmless,
        has_other_notes=any(not isinstance(note, Info) for note in other_notes),
        compared={"keys": True, "shapes": True, "dtypes": not options.ignore_dtype, **compared},
        outlines=(outlines(mine), outlines(theirs)),
        kinds=kinds_by_side(left=left.kinds_of(mine), right=right.kinds_of(theirs)),
        names=operands,
    )


def names_of(left: Checkpoint, right: Checkpoint) -> Sides:
    """Return the operands as the names of the two sides; ``left`` and ``right`` if neither has a
    name.
    """
    is_nameless = left.source == right.source == MEMORY.title
    return SIDES if is_nameless else (left.source, right.source)


# Statuses of equal weights: what a program has under other names, or with another number of names.
OTHER_NAMES = frozenset({"renamed", "transformed", "alias"})


def is_program(*checkpoints: Checkpoint) -> bool:
    """Return True if one of them is a program: it keeps its own names, whatever weights it has."""
    return any(format_of(checkpoint).holds.programs for checkpoint in checkpoints)


def program_and_weights(left: Checkpoint, right: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Return the two in the order of `swap-weights`, which takes the program first."""
    return (right, left) if is_program(right) else (left, right)


def is_written_program(checkpoint: Checkpoint) -> bool:
    """Return True if it is a program whose names a remap can change."""
    kind = format_of(checkpoint)
    return kind.holds.programs and kind.writes


def _saved_optimizers(
    left: Checkpoint, right: Checkpoint
) -> tuple[SavedOptimizer, SavedOptimizer] | None:
    """Return the two optimizers if both sides hold nothing but the state of one."""
    mine, theirs = optimizer_alone(left), optimizer_alone(right)
    return (
        None
        if mine is None or theirs is None
        else (SavedOptimizer.of(left, mine), SavedOptimizer.of(right, theirs))
    )


def _models(
    left: Checkpoint, right: Checkpoint, model: ModelOperand | None
) -> tuple[Section, Section, Names | None]:
    """Return the sections of the two models, and the names that both are read with."""
    mine, theirs = model_section(left), model_section(right)
    names = (
        None
        if model is None
        else as_read(as_read(model, mine, left.source), theirs, right.source).names()
    )
    return mine, theirs, names


def _optimizers(
    left: Checkpoint,
    right: Checkpoint,
    saved: tuple[SavedOptimizer, SavedOptimizer],
    model: ModelOperand | None,
    values: Values | None,
    options: CompareOptions,
) -> Diff:
    """Compare two saved optimizers."""
    names = None if model is None else model.names()
    diff = compare_optimizers(*saved, names, values)
    entries = (*diff.entries, *compare_outside(left, right, values))
    notes: list[str] = []
    if diff.by_id:
        notes.append(
            Info(
                "parameters are compared by id: pass --model MODEL to compare them by name",
                "compared-by",
            )
        )
    if diff.classes[0] != diff.classes[1]:
        classes = [title or UNKNOWN_CLASS for title in diff.classes]
        words = "{left} is the state of {}, {right} of {}: neither loads the other's"
        notes.append(Note.about(words, "optimizer-class", *classes))
    other_notes, compared = _compare_others(
        left, right, (saved[0].section, saved[1].section), names, values, options
    )

    # What brings the first optimizer into the form, the order and the groups of the second
    form, wanted = (forms.read(one.section).form for one in saved)
    remedy = None
    if any(
        e.status == "order" or (e.status == "renamed" and e.right[0].startswith(GROUPS))
        for e in entries
    ):
        remedy = Remedy("like_right", None if form == wanted else wanted)
    elif form != wanted:
        remedy = Remedy(
            "keys_by_model" if model is not None or not is_named(saved[0]) else "keys", wanted
        )
    return Diff(
        left.source,
        right.source,
        identical=all(entry.status in EITHER_WAY for entry in entries),
        entries=entries,
        notes=(*notes, *diff.notes, *other_notes),
        remedy=remedy,
        has_other_notes=bool(other_notes),
        compared=dict.fromkeys(("keys", "shapes", "dtypes"), True) | compared,
        outlines=diff.outlines,
        names=names_of(left, right),
    )


# Tied tensors


def _tie_notes(left: Checkpoint, right: Checkpoint, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a note on keys that are one tensor on one side, and separate tensors on the other.

    It is information only if the other side's format cannot hold one tensor under two names, as
    safetensors.
    """
    left_first, right_first = model_section(left).aliases(), model_section(right).aliases()
    if not left_first and not right_first:
        return
    right_of: dict[str, str] = {}
    for entry in entries:
        if len(entry.left) == len(entry.right) == 1:
            right_of[entry.left[0]] = entry.right[0]
    left_of = {right_key: left_key for left_key, right_key in right_of.items()}
    for side, first, counterpart, other_first, other in (
        (FIELDS[0], left_first, right_of, right_first, right),
        (FIELDS[1], right_first, left_of, left_first, left),
    ):
        untied = []
        for key, first_key in first.items():
            name, first_name = counterpart.get(key), counterpart.get(first_key)
            if name is None or first_name is None:
                continue
            if other_first.get(name, name) != other_first.get(first_name, first_name):
                untied.append(f"{key} = {first_key}")
        if untied:
            kind = Note if format_of(other).holds.aliases else Info
            yield kind.about(f"tied in {side} only: {{}}", "ties", some(untied))


def _metadata_notes(left: Checkpoint, right: Checkpoint) -> Iterator[str]:
    """Yield a note on the entries of ``__metadata__`` that differ; information if only one of the
    formats has it.
    """
    if left.metadata == right.metadata:
        return
    names, fields = list[str](), list[str]()
    for name in dict.fromkeys((*left.metadata, *right.metadata)):
        if left.metadata.get(name) == right.metadata.get(name):
            continue
        names.append(name)
        if name not in right.metadata:
            fields.append("{} (in {left} only)")
        elif name not in left.metadata:
            fields.append("{} (in {right} only)")
        else:
            fields.append("{}")
    words = f"the metadata of the files (__metadata__) differs: {some(fields)}"
    kind = Note if left.format == right.format else Info
    yield kind.about(words, "metadata", *names)


# Everything besides the two models


def compare_outside(
    left: Checkpoint, right: Checkpoint, values: Values | None
) -> tuple[Entry, ...]:
    """Compare the entries outside of state dicts that both have, and all storages that belong to no
    known tensor.
    """
    mine, theirs = loose_entries(left), loose_entries(right)
    entries = [compare_pair(mine[key], theirs[key], values) for key in mine if key in theirs]
    formats = {format_of(left), format_of(right)}
    if len(formats) > 1 and any(row.holds.code_storages for row in formats):
        return tuple(entries)  # other formats have no place for the constants of its code

    # Only their bytes identify such storages, so these are always compared.
    by_content: dict[bytes | None, list[Unreached]] = {}
    for storage in right.unreached:
        by_content.setdefault(_content(storage), []).append(storage)
    alone = []
    for storage in left.unreached:
        content = _content(storage)
        same = by_content.get(content) if content is not None else None
        if same:
            entries.append(Entry("same", (storage.path,), (same.pop(0).path,)))
        else:
            alone.append(only_left(storage.path, _STORAGE_LEFT))
    rest = (
        only_right(storage.path, _STORAGE_RIGHT)
        for storages in by_content.values()
        for storage in storages
    )
    return (*entries, *alone, *rest)


_STORAGE_LEFT, _STORAGE_RIGHT = (
    Cause(Code.STORAGE).and_also(Cause(Code.UNEXPECTED)),
    Cause(Code.STORAGE).and_also(Cause(Code.MISSING)),
)


def loose_entries(checkpoint: Checkpoint) -> dict[str, TensorEntry | ExtraEntry]:
    """Return the entries outside of state dicts and optimizers, by their dotted path."""
    return {
        entry.key: entry
        for section in checkpoint.sections
        if section.kind == "other"
        for entry in section.entries
    }


def _content(storage: Unreached) -> bytes | None:
    try:
        return content_of_storage(storage.storage)
    except CkptError:
        return None


def _compare_others(
    left: Checkpoint,
    right: Checkpoint,
    models: tuple[Section, Section],
    names: Names | None,
    values: Values | None,
    options: CompareOptions,
) -> tuple[list[str], dict[str, bool]]:
    """Return notes on what differs or was not compared, and which aspects were compared
    completely.
    """
    mine, theirs = _other_sections(left, right, models)
    notes, skipped = _section_notes(left, right, models, names, values, options)
    loose = loose_entries(left), loose_entries(right)
    for side, source, own, others, tensors, known in (
        (FIELDS[0], left.source, mine, theirs, loose[0], loose[1]),
        (FIELDS[1], right.source, theirs, mine, loose[1], loose[0]),
    ):
        alone = [section.title for path, section in own.items() if path not in others]
        if alone:
            words = f"not compared: {{}} in {side} only (for example {{}}::{{}})"
            notes.append(Note.about(words, "not-compared", some(alone), source, alone[0]))
        keys = [key for key in tensors if key not in known]
        if keys:
            count = plural(len(keys), "entry")
            words = f"not compared: {count} outside of state dicts in {side} only: {{}}"
            notes.append(Note.about(words, "not-compared", some(keys)))
        skipped = skipped or bool(alone or keys)
    if values is not None:
        mine_objects, their_objects = (
            {entry.key: entry for entry in side.objects} for side in (left, right)
        )
        for side, objects, other_objects in (
            (FIELDS[0], mine_objects, their_objects),
            (FIELDS[1], their_objects, mine_objects),
        ):
            alone = [path or "(root)" for path in objects if path not in other_objects]
            if alone:
                words = f"non-tensor entries in {side} only: {{}}"
                notes.append(Note.about(words, "other-sections", some(alone)))
        both = [path for path in mine_objects if path in their_objects]
        unlike = [
            path or "(root)"
            for path in both
            if not same_objects(mine_objects[path], their_objects[path])
        ]
        if unlike:
            notes.append(
                Note(f"non-tensor entries with different values: {some(unlike)}", "other-sections")
            )
    compared = {
        "values": values is not None,
        **dict.fromkeys(("aliases", "metadata"), True),
        **dict.fromkeys(("optimizers", "other_sections"), not skipped),
        "objects": values is not None,
    }
    if is_program(left, right):
        compared["code"] = False
    return notes, compared


def _compare_versions(
    left: Checkpoint,
    right: Checkpoint,
    models: tuple[Section, Section],
    names: Names | None,
) -> tuple[list[str], str]:
    """Return a note on module versions that differ, and why the two are not identical if loading
    depends on them, in words with the fields of the sides.

    With the `names` of a model, loading is compared. A format that has no place for versions does
    not count as a difference.
    """
    others = other_versions_of(*models)
    if not others:
        return [], ""
    has_place = all(
        model.modules or format_of(side).holds.versions
        for model, side in zip(models, (left, right))
    )
    decisive = [
        one
        for one in others
        if one.effect is Effect.LOADING or (one.effect is Effect.UNKNOWN and has_place)
    ]
    lost = FIELDS[0] if not models[0].modules else FIELDS[1]
    cause = (
        f"{lost} lost its module versions" if others[0].is_lost else ("the module versions differ")
    )
    if names is not None:  # the model's own loading was compared
        modules = some([*map(str, others)])
        return [Info.about(f"{cause} (_metadata): {{}}", "module-versions", modules)], ""
    if not decisive:
        doubt = "only the model's code tells if loading depends on them"
        known = all(one.effect is Effect.NOTHING for one in others)
        effect = "loading these keys is the same" if known else doubt
        words = f"{cause} (_metadata); {effect}: {{}}"
        return [Info.about(words, "module-versions", some([*map(str, others)]))], ""
    certain = all(one.effect is Effect.LOADING for one in decisive)
    how = (
        "torch loads these keys differently"
        if certain
        else ("torch may load these keys differently")
    )
    words = f"{cause} (_metadata), and {how}: {{}}"
    return [Note.about(words, "module-versions", some([*map(str, decisive)]))], cause


def _other_sections(
    left: Checkpoint, right: Checkpoint, models: tuple[Section, Section]
) -> tuple[dict[str, Section], dict[str, Section]]:
    """Return the state dicts and optimizers besides the models, by path."""
    mine, theirs = (
        {s.path: s for s in side.sections if s.kind != "other" and s.path != model.path}
        for side, model in zip((left, right), models)
    )
    return mine, theirs


def _section_notes(
    left: Checkpoint,
    right: Checkpoint,
    models: tuple[Section, Section],
    names: Names | None,
    values: Values | None,
    options: CompareOptions,
) -> tuple[list[str], bool]:
    """Compare the sections that both have under one path: a note on each difference, and if one was
    not compared.
    """
    notes, skipped = list[str](), False
    mine, theirs = _other_sections(left, right, models)
    for path in [path for path in mine if path in theirs]:
        one, other = mine[path], theirs[path]
        if one.kind != other.kind:
            words = "{}: {} in {left}, {} in {right}"
            notes.append(Note.about(words, "other-sections", one.title, one.kind, other.kind))
            continue
        try:
            harmless = EITHER_WAY
            if one.kind == "state_dict":
                entries = compare(one, other, values)
                if options.ignore_dtype:
                    entries, harmless = without_dtypes(entries), harmless | {"dtype"}
            else:
                saved = SavedOptimizer.of(left, one), SavedOptimizer.of(right, other)
                entries = compare_optimizers(*saved, names, values).entries
        except CkptError as error:
            notes.append(Note(f"not compared: {one.title}: {error.message}", "not-compared"))
            skipped = True
            continue
        count = sum(not entry.is_one_of(harmless) for entry in entries)
        if count:
            again = command("diff", (f"{left.source}::{path}", f"{right.source}::{path}"), options)
            notes.append(
                Note(f"{one.title}: {plural(count, 'difference')} ({again})", "other-sections")
            )
    return notes, skipped


# The same comparison shared by the ranks of a job


def compare_on_ranks(
    values: Values | None, *comparisons: Callable[[Values], object]
) -> Values | None:
    """Return `values` with all answers that the comparisons need, found by the ranks of the job;
    then rank 0 goes on.

    Every rank runs the comparisons once, as if all values were equal, to learn which tensors they
    compare. What they compare only if values differ is computed when it is needed. Without a job,
    return `values`.
    """
    if values is None or current() is None:
        return values
    compute = values
    # keeps alive what the keys are ids of
    pairs: dict[tuple[object, object], tuple[TensorEntry, TensorEntry]] = {}

    def note(left: TensorEntry, right: TensorEntry) -> None:
        if left.storage is not None and right.storage is not None:
            pairs.setdefault((left.identity, right.identity), (left, right))

    def as_json(left: TensorEntry, right: TensorEntry) -> dict[str, Any] | None:
        difference = compute(left, right)
        return None if difference is None else asdict(difference)

    for comparison in comparisons:
        comparison(note)
    questions = {
        at: Question(a.key, a.nbytes + b.nbytes, partial(as_json, a, b))
        for at, (a, b) in pairs.items()
    }
    known = answers("comparing values", questions)
    only_first()

    def look_up(left: TensorEntry, right: TensorEntry) -> Difference | None:
        at = left.identity, right.identity
        if at not in pairs:
            return compute(left, right)
        answer = known[at]
        if answer is None:
            return None
        return Difference(
            answer["text"], tuple((exponent, count) for exponent, count in answer["spread"])
        )

    return look_up


def read_all_values(
    left: Checkpoint, right: Checkpoint, model: ModelOperand | None, values: Values
) -> None:
    """Compare `values` of every pair of tensors that a diff of the two compares, and read nothing
    else.
    """
    saved = _saved_optimizers(left, right)
    if saved is not None:
        compare_optimizers(*saved, None if model is None else model.names(), values)
    else:
        mine, theirs, names = _models(left, right, model)
        if names is None:
            compare(mine, theirs, values)
        else:
            compare_through(names, mine, theirs, values)
        _section_notes(left, right, (mine, theirs), names, values, CompareOptions())
    mine_loose, their_loose = loose_entries(left), loose_entries(right)
    for key in [key for key in mine_loose if key in their_loose]:
        compare_pair(mine_loose[key], their_loose[key], values)
