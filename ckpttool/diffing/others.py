"""Compare what two checkpoints hold besides the two models: optimizers, other state dicts, entries
outside of them, and files next to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from ckpttool.core.checkpoint import Section, Unreached
from ckpttool.core.errors import CkptError
from ckpttool.core.tables import by_key
from ckpttool.core.text import Note, plural, shell, some, title_of
from ckpttool.diffing.causes import Cause, Code
from ckpttool.diffing.options import CompareOptions
from ckpttool.diffing.pairs import Values, compare_pair
from ckpttool.diffing.result import EITHER_WAY, Entry, only_left, only_right
from ckpttool.diffing.saved_optimizers import SavedOptimizer, compare_optimizers
from ckpttool.diffing.sections import compare, without_dtypes
from ckpttool.diffing.sides import BothSides, Side
from ckpttool.evaluate.compare import content_of_storage, same_objects
from ckpttool.formats.folders import optimizers_in
from ckpttool.formats.opening import files_next_to
from ckpttool.formats.registry import format_of
from ckpttool.io.files import have_same_bytes
from ckpttool.io.paths import join
from ckpttool.operands.checkpoint import split
from ckpttool.operands.output import command


def compare_others(
    sides: BothSides, values: Values | None, options: CompareOptions
) -> tuple[list[str], dict[str, bool]]:
    """Return notes on what differs or was not compared, and which aspects were compared
    completely.
    """
    notes, all_compared = compare_sections(sides, values, options)
    left_only, right_only = only_on_one_side(sides)
    of_files = _file_notes(sides, values)
    notes += [*left_only, *right_only, *of_files]
    if values is not None:
        notes += _object_notes(sides)
    all_compared = all_compared and not left_only and not right_only and not of_files
    compared = {
        "values": values is not None,
        "aliases": True,
        "metadata": True,
        "optimizers": all_compared,
        "other_sections": all_compared,
        "objects": values is not None and not of_files,
    }
    if sides.has_program:
        compared["code"] = False
    return notes, compared


def _file_notes(sides: BothSides, values: Values | None) -> list[str]:
    """Return a note on files of a trainer (optimizer, scheduler) next to the weights; nothing if
    both folders have them with the same bytes, which are read only if `values` are.
    """
    (left, section), (right, other_section) = split(sides.left.source), split(sides.right.source)
    if section is not None or other_section is not None:
        return []
    left_files = files_next_to(sides.left.checkpoint, left)
    right_files = files_next_to(sides.right.checkpoint, right)
    not_compared = []
    for name in dict.fromkeys((*left_files, *right_files)):
        is_read = values is not None and name in left_files and name in right_files
        if not is_read or not have_same_bytes(join(left, name), join(right, name)):
            not_compared.append(name)
    if not not_compared:
        return []
    text = f"not compared: other files in the folder: {some(not_compared)}"
    for name in optimizers_in(not_compared):
        if name in left_files and name in right_files:
            line = shell("ckpttool", "diff", join(left, name), join(right, name), "--values")
            text += f" ({line})"
    return [Note(text, "not-compared")]


# Other sections


def compare_sections(
    sides: BothSides, values: Values | None, options: CompareOptions
) -> tuple[list[str], bool]:
    """Compare the sections that both have under one path. Return a note on each that differs, also
    in its kind, and whether all were compared.
    """
    notes: list[str] = []
    all_compared = True
    right_sections = sides.right.others
    for path, section in sides.left.others.items():
        other = right_sections.get(path)
        if other is None:
            continue
        if section.kind != other.kind:
            words = "{}: {} in {left}, {} in {right}"
            kinds = (section.title, section.kind, other.kind)
            notes.append(Note.about(words, "other-sections", *kinds))
            continue
        try:
            count = _count_differences(sides, section, other, values, options)
        except CkptError as error:
            notes.append(Note(f"not compared: {section.title}: {error.message}", "not-compared"))
            all_compared = False
            continue
        if count:
            operands = f"{sides.left.source}::{path}", f"{sides.right.source}::{path}"
            line = command("diff", operands, options)
            text = f"{section.title}: {plural(count, 'difference')} ({line})"
            notes.append(Note(text, "other-sections"))
    return notes, all_compared


def _count_differences(
    sides: BothSides, left: Section, right: Section, values: Values | None, options: CompareOptions
) -> int:
    """Return how many entries of two state dicts or optimizers differ."""
    harmless = EITHER_WAY
    if left.kind == "state_dict":
        entries = compare(left, right, values)
        if options.ignore_dtype:
            entries, harmless = without_dtypes(entries), harmless | {"dtype"}
    else:
        left_saved = SavedOptimizer.of(sides.left.checkpoint, left)
        right_saved = SavedOptimizer.of(sides.right.checkpoint, right)
        entries = compare_optimizers(left_saved, right_saved, sides.names, values).entries
    return sum(not entry.is_one_of(harmless) for entry in entries)


def only_on_one_side(sides: BothSides) -> tuple[list[str], list[str]]:
    """Return notes on sections and entries that only the left has, and that only the right has."""
    return _only_here(sides.left, sides.right), _only_here(sides.right, sides.left)


def _only_here(side: Side, other: Side) -> list[str]:
    """Return notes on the sections and the loose entries that only the `side` has."""
    notes: list[str] = []
    other_sections, other_entries = other.others, other.loose_entries
    titles = [section.title for path, section in side.others.items() if path not in other_sections]
    if titles:
        words = f"not compared: {{}} in {side.field} only (for example {{}}::{{}})"
        example = (side.source, titles[0])
        notes.append(Note.about(words, "not-compared", some(titles), *example))
    keys = [key for key in side.loose_entries if key not in other_entries]
    if keys:
        count = plural(len(keys), "entry")
        words = f"not compared: {count} outside of state dicts in {side.field} only: {{}}"
        notes.append(Note.about(words, "not-compared", some(keys)))
    return notes


# Entries outside of state dicts


def compare_loose(sides: BothSides, values: Values | None) -> list[Entry]:
    """Compare the entries outside of state dicts that both have."""
    entries: list[Entry] = []
    right_entries = sides.right.loose_entries
    for key, entry in sides.left.loose_entries.items():
        if key in right_entries:
            entries.append(compare_pair(entry, right_entries[key], values))
    return entries


def compare_outside(sides: BothSides, values: Values | None) -> tuple[Entry, ...]:
    """Compare the entries outside of state dicts that both have, and all storages that belong to no
    known tensor.
    """
    entries = compare_loose(sides, values)
    left, right = sides.left.checkpoint, sides.right.checkpoint
    formats = {format_of(left), format_of(right)}
    if len(formats) > 1 and any(row.holds.code_storages for row in formats):
        return tuple(entries)  # other formats have no place for the constants of its code
    return (*entries, *_compare_storages(left.unreached, right.unreached))


def _compare_storages(left: Iterable[Unreached], right: Iterable[Unreached]) -> Iterator[Entry]:
    """Yield the entries of storages of no known tensor. Only their bytes identify them, so these
    are always compared.
    """
    by_content: dict[bytes | None, list[Unreached]] = {}
    for storage in right:
        by_content.setdefault(_content(storage), []).append(storage)
    alone = []
    for storage in left:
        content = _content(storage)
        same = None if content is None else by_content.get(content)
        if same:
            yield Entry("same", (storage.path,), (same.pop(0).path,))
        else:
            alone.append(storage)
    storage_of_no_tensor = Cause(Code.STORAGE)
    for storage in alone:
        yield only_left(storage.path, storage_of_no_tensor.and_also(Cause(Code.UNEXPECTED)))
    for storage in chain(*by_content.values()):
        yield only_right(storage.path, storage_of_no_tensor.and_also(Cause(Code.MISSING)))


def _content(storage: Unreached) -> bytes | None:
    try:
        return content_of_storage(storage.storage)
    except CkptError:
        return None


def _object_notes(sides: BothSides) -> Iterator[str]:
    """Yield notes on the objects outside of state dicts that differ."""
    for side, other in sides.each_way:
        other_objects = by_key(other.checkpoint.objects)
        alone = [
            title_of(entry.key)
            for entry in side.checkpoint.objects
            if entry.key not in other_objects
        ]
        if alone:
            words = f"non-tensor entries in {side.field} only: {{}}"
            yield Note.about(words, "other-sections", some(alone))
    unlike = []
    right_objects = by_key(sides.right.checkpoint.objects)
    for path, entry in by_key(sides.left.checkpoint.objects).items():
        if path in right_objects and not same_objects(entry, right_objects[path]):
            unlike.append(title_of(path))
    if unlike:
        yield Note(f"non-tensor entries with different values: {some(unlike)}", "other-sections")
