"""What two checkpoints hold besides the two models that are compared: optimizers, other state
dicts, entries outside of them, ties, metadata and module versions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry, Unreached
from ckpttool.core.errors import CkptError
from ckpttool.core.names import Names
from ckpttool.core.text import Info, Note, plural, shell, some, title_of
from ckpttool.core.values import dataclass
from ckpttool.diffing.causes import FIELDS, Cause, Code
from ckpttool.diffing.one_model import compare_through
from ckpttool.diffing.options import CompareOptions
from ckpttool.diffing.result import EITHER_WAY, Entry, only_left, only_right
from ckpttool.diffing.saved_optimizers import SavedOptimizer, compare_optimizers
from ckpttool.diffing.sections import Values, compare, compare_pair, without_dtypes
from ckpttool.evaluate.compare import content_of_storage, same_objects
from ckpttool.formats.folders import optimizers_in
from ckpttool.formats.opening import files_next_to
from ckpttool.formats.registry import format_of
from ckpttool.io.files import have_same_bytes
from ckpttool.io.paths import join
from ckpttool.naming.versions import Effect, other_versions_of
from ckpttool.operands.checkpoint import split
from ckpttool.operands.output import command


@dataclass(frozen=True, slots=True)
class BothSides:
    """Two checkpoints, and the section of each that is compared: its model, or its optimizer.

    `names` are the names of the model that both are read with, if one was named.
    """

    left: Checkpoint
    right: Checkpoint
    left_section: Section
    right_section: Section
    names: Names | None = None

    def compare(self, values: Values | None) -> tuple[Entry, ...]:
        """Compare the two models."""
        if self.names is None:
            return compare(self.left_section, self.right_section, values)
        return compare_through(self.names, self.left_section, self.right_section, values)

    @property
    def has_program(self) -> bool:
        return any_program(self.left, self.right)


def any_program(*checkpoints: Checkpoint) -> bool:
    """Return True if one of them is a program: it keeps its own names, whatever weights it has."""
    return any(format_of(checkpoint).holds.programs for checkpoint in checkpoints)


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
        notes += _object_notes(sides.left.objects, sides.right.objects)
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
    left_files, right_files = files_next_to(sides.left, left), files_next_to(sides.right, right)
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
    right_sections = _other_sections(sides.right, sides.right_section)
    for path, section in _other_sections(sides.left, sides.left_section).items():
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
        left_saved = SavedOptimizer.of(sides.left, left)
        right_saved = SavedOptimizer.of(sides.right, right)
        entries = compare_optimizers(left_saved, right_saved, sides.names, values).entries
    return sum(not entry.is_one_of(harmless) for entry in entries)


def _other_sections(checkpoint: Checkpoint, compared: Section) -> dict[str, Section]:
    """Return the state dicts and optimizers besides the compared one, by path."""
    sections = {}
    for section in checkpoint.sections:
        if section.kind != "other" and section.path != compared.path:
            sections[section.path] = section
    return sections


def only_on_one_side(sides: BothSides) -> tuple[list[str], list[str]]:
    """Return notes on sections and entries that only the left has, and that only the right has."""
    left, right = sides.left, sides.right
    left_sections = _other_sections(left, sides.left_section)
    right_sections = _other_sections(right, sides.right_section)
    left_entries, right_entries = loose_entries(left), loose_entries(right)
    return (
        _only_here(FIELDS[0], left, left_sections, right_sections, left_entries, right_entries),
        _only_here(FIELDS[1], right, right_sections, left_sections, right_entries, left_entries),
    )


def _only_here(
    side: str,
    checkpoint: Checkpoint,
    sections: Mapping[str, Section],
    other_sections: Collection[str],
    entries: Iterable[str],
    other_entries: Collection[str],
) -> list[str]:
    """Return notes on the sections, by path, and the loose entries, by path, that only the
    checkpoint has: it is the `side` of a field in words.
    """
    notes: list[str] = []
    titles = [section.title for path, section in sections.items() if path not in other_sections]
    if titles:
        words = f"not compared: {{}} in {side} only (for example {{}}::{{}})"
        example = (checkpoint.source, titles[0])
        notes.append(Note.about(words, "not-compared", some(titles), *example))
    keys = [key for key in entries if key not in other_entries]
    if keys:
        count = plural(len(keys), "entry")
        words = f"not compared: {count} outside of state dicts in {side} only: {{}}"
        notes.append(Note.about(words, "not-compared", some(keys)))
    return notes


# Entries outside of state dicts


def loose_entries(checkpoint: Checkpoint) -> dict[str, TensorEntry | ExtraEntry]:
    """Return the entries outside of state dicts and optimizers, by their dotted path."""
    entries: dict[str, TensorEntry | ExtraEntry] = {}
    for section in checkpoint.sections:
        if section.kind == "other":
            entries.update(section.by_key())
    return entries


def compare_loose(left: Checkpoint, right: Checkpoint, values: Values | None) -> list[Entry]:
    """Compare the entries outside of state dicts that both have."""
    entries: list[Entry] = []
    right_entries = loose_entries(right)
    for key, entry in loose_entries(left).items():
        if key in right_entries:
            entries.append(compare_pair(entry, right_entries[key], values))
    return entries


def compare_outside(
    left: Checkpoint, right: Checkpoint, values: Values | None
) -> tuple[Entry, ...]:
    """Compare the entries outside of state dicts that both have, and all storages that belong to no
    known tensor.
    """
    entries = compare_loose(left, right, values)
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


def _object_notes(left: Iterable[ExtraEntry], right: Iterable[ExtraEntry]) -> Iterator[str]:
    """Yield notes on the objects outside of state dicts that differ."""
    left_objects = {entry.key: entry for entry in left}
    right_objects = {entry.key: entry for entry in right}
    for side, objects, other_objects in (
        (FIELDS[0], left_objects, right_objects),
        (FIELDS[1], right_objects, left_objects),
    ):
        alone = [title_of(path) for path in objects if path not in other_objects]
        if alone:
            words = f"non-tensor entries in {side} only: {{}}"
            yield Note.about(words, "other-sections", some(alone))
    unlike = []
    for path, entry in left_objects.items():
        if path in right_objects and not same_objects(entry, right_objects[path]):
            unlike.append(title_of(path))
    if unlike:
        yield Note(f"non-tensor entries with different values: {some(unlike)}", "other-sections")


# Tied tensors


def tie_notes(sides: BothSides, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a note on keys that are one tensor on one side, and separate tensors on the other.

    It is information only if the other side's format cannot hold one tensor under two names, as
    safetensors.
    """
    left_first, right_first = sides.left_section.aliases(), sides.right_section.aliases()
    if not left_first and not right_first:
        return
    right_of: dict[str, str] = {}
    left_of: dict[str, str] = {}
    for entry in entries:
        if len(entry.left) == len(entry.right) == 1:
            left_key, right_key = entry.left[0], entry.right[0]
            right_of[left_key] = right_key
            left_of[right_key] = left_key
    yield from _tied_here(FIELDS[0], left_first, right_of, right_first, sides.right)
    yield from _tied_here(FIELDS[1], right_first, left_of, left_first, sides.left)


def _tied_here(
    side: str,
    first: Mapping[str, str],
    counterpart: Mapping[str, str],
    other_first: Mapping[str, str],
    other: Checkpoint,
) -> Iterator[str]:
    """Yield a note on the second names of a side whose counterparts are separate tensors. `first`:
    second name -> first name.
    """
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


# Metadata and versions


# transformers writes which library's tensors a safetensors file holds; other formats need no mark
_LIBRARY = "format"


def metadata_notes(left: Checkpoint, right: Checkpoint) -> Iterator[str]:
    """Yield a note on the entries of ``__metadata__`` that differ; information if only one of the
    formats has it.
    """
    if left.metadata == right.metadata:
        return
    names: list[str] = []
    fields: list[str] = []
    for name in dict.fromkeys((*left.metadata, *right.metadata)):
        if left.metadata.get(name) == right.metadata.get(name):
            continue
        if name == _LIBRARY and left.format != right.format:
            continue
        names.append(name)
        if name not in right.metadata:
            fields.append("{} (in {left} only)")
        elif name not in left.metadata:
            fields.append("{} (in {right} only)")
        else:
            fields.append("{}")
    if not names:
        return
    words = f"the metadata of the files (__metadata__) differs: {some(fields)}"
    kind = Note if left.format == right.format else Info
    yield kind.about(words, "metadata", *names)


def compare_versions(sides: BothSides) -> tuple[list[str], str]:
    """Return a note on module versions that differ, and the cause, in words with the fields of the
    sides, if the difference counts because loading depends on it; else an empty text.

    With the names of a model, loading is compared. A format that has no place for versions does
    not count as a difference.
    """
    others = other_versions_of(sides.left_section, sides.right_section)
    if not others or sides.has_program:  # programs have no versions
        return [], ""
    cause = "the module versions differ"
    if others[0].is_lost:
        lost = FIELDS[1] if sides.left_section.modules else FIELDS[0]
        cause = f"{lost} lost its module versions"
    subject, modules = f"{cause} (_metadata)", some(list(map(str, others)))
    if sides.names is not None:  # the model's own loading was compared
        return [Info.about(f"{subject}: {{}}", "module-versions", modules)], ""
    effects = {version.effect for version in others}
    decisive = {Effect.LOADING}
    if _has_versions(sides.left, sides.left_section) and _has_versions(
        sides.right, sides.right_section
    ):
        decisive.add(Effect.UNKNOWN)
    if effects.isdisjoint(decisive):
        how = "only the model's code tells if loading depends on them"
        if effects == {Effect.NOTHING}:
            how = "loading these keys is the same"
        return [Info.about(f"{subject}; {how}: {{}}", "module-versions", modules)], ""
    how = "may load" if Effect.UNKNOWN in effects & decisive else "loads"
    words = f"{subject}, and torch {how} these keys differently: {{}}"
    modules = some([str(version) for version in others if version.effect in decisive])
    return [Note.about(words, "module-versions", modules)], cause


def _has_versions(checkpoint: Checkpoint, section: Section) -> bool:
    """Return whether the section has module versions, or could have them."""
    return bool(section.modules) or format_of(checkpoint).holds.versions
