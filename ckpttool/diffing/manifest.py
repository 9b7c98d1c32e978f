"""A checkpoint against a manifest of one: every section, name by name, and with values every digest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, TensorEntry
from ckpttool.core.keys import dotted
from ckpttool.core.text import some
from ckpttool.diffing.checkpoints import dealt
from ckpttool.diffing.result import HARMLESS, NOT_UNDERSTOOD, ONLY_LEFT, ONLY_RIGHT, Diff, Entry, only_left, only_right
from ckpttool.diffing.sections import Values, compare_pair
from ckpttool.evaluate.compare import sha256_of
from ckpttool.formats.manifest import all_extras, other_files
from ckpttool.formats.registry import MANIFEST, MEMORY
from ckpttool.operands.checkpoint import split


def is_about_manifest(left: Checkpoint, right: Checkpoint) -> bool:
    """Whether one of the two is a manifest."""
    return MANIFEST.name in (left.format, right.format)


def compare_manifest(left: Checkpoint, right: Checkpoint, values: Values | None) -> Diff:
    """Identical where both have the same sections and names, and with `values` the same bytes under each name.

    Files that are the manifest's to the byte need no look at their tensors.
    """
    other = None if values is None else _other_files(left, right)
    have, want = _by_place(left), _by_place(right)
    both = [place for place in have if place in want]
    if other == []:
        entries = [Entry("same", (have[place].key,), (want[place].key,)) for place in both]
    else:
        values = dealt(values, lambda asked: [compare_pair(have[place], want[place], asked) for place in both])
        entries = [compare_pair(have[place], want[place], values) for place in both]
    entries += [only_left(entry.key) for place, entry in have.items() if place not in want]
    entries += [only_right(entry.key) for place, entry in want.items() if place not in have]
    entries += _storages(left, right)
    beyond = "" if set(left.others) == set(right.others) else "only one side has some entry that is no tensor"
    identical = not beyond and all(entry.status in HARMLESS for entry in entries)
    notes = tuple(_notes(left, right, values, other))
    compared = dict.fromkeys(("keys", "shapes", "dtypes"), True) | {"values": values is not None}
    compared |= dict.fromkeys(("aliases", "metadata", "optimizers", "other_sections", "objects"), other == [])
    return Diff(left.source, right.source, identical, tuple(entries), notes=notes, beyond=beyond, compared=compared)


def _by_place(checkpoint: Checkpoint) -> dict[tuple[str, str], TensorEntry | ExtraEntry]:
    """Every entry by its section's path and its key: joined by a dot, two of them may be one name.

    What is no tensor is one thing, with the tensors inside it.
    """
    found: dict[tuple[str, str], TensorEntry | ExtraEntry] = {}
    for section in checkpoint.sections:
        for tensor in section.tensors:
            found[section.path, tensor.key] = tensor.under(dotted(section.path, tensor.key))
        for extra in all_extras(section):
            found[section.path, extra.key] = replace(extra, key=dotted(section.path, extra.key), tensors=())
    return found


def _storages(left: Checkpoint, right: Checkpoint) -> Iterator[Entry]:
    """What is not understood is compared always: nothing but its bytes tells it."""
    mine, theirs = ({found.path: found.storage.data for found in side.unreached} for side in (left, right))
    for path in {**mine, **theirs}:
        if path not in theirs:
            yield only_left(path, f"{NOT_UNDERSTOOD}: {ONLY_LEFT}")
        elif path not in mine:
            yield only_right(path, f"{NOT_UNDERSTOOD}: {ONLY_RIGHT}")
        else:
            same = sha256_of(mine[path]) == sha256_of(theirs[path])
            yield Entry("same" if same else "value", (path,), (path,), "" if same else NOT_UNDERSTOOD)


def _other_files(left: Checkpoint, right: Checkpoint) -> list[str]:
    """In what the files are others than the manifest's; of two manifests the digests of tensors tell.

    A file more may be one that is read in the place of another.
    """
    manifest, other = (right, left) if right.format == MANIFEST.name else (left, right)
    whole = other.format not in (MANIFEST.name, MEMORY.name, "rank_files") and split(other.source)[1] is None
    if manifest.container is None or not whole:
        return ["the files were not compared"]
    changed, more = other_files(manifest, other.source)
    found = [f"{name} is another file than the manifest's" for name in changed]
    return [*found, f"not among the manifest's files: {some(more)}"] if more else found


def _notes(left: Checkpoint, right: Checkpoint, values: Values | None, other: list[str] | None) -> Iterator[str]:
    if values is None:
        yield "no digest was compared: --values compares them"
    elif not other:
        yield "the files are those of the manifest, to the byte"
        return
    yield from other or ()
    for side, mine, theirs in (("left", left, right), ("right", right, left)):
        alone = [name for name in mine.others if name not in theirs.others]
        if alone:
            yield f"beside the tensors only {side} has {', '.join(alone)}"
    both = [name for name in left.others if name in right.others]
    if both:
        yield f"not compared, since it is no tensor: {', '.join(both)}"
