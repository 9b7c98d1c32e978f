"""Compare what two checkpoints say about their tensors: ties, metadata and module versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpttool.core.tables import inverse
from ckpttool.core.text import Info, Note, some
from ckpttool.diffing.result import Entry
from ckpttool.diffing.sides import BothSides, Side
from ckpttool.formats.registry import format_of
from ckpttool.naming.versions import Effect, other_versions_of


def tie_notes(sides: BothSides, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a note on keys that are one tensor on one side, and separate tensors on the other.

    It is information only if the other side's format cannot hold one tensor under two names, as
    safetensors.
    """
    if not sides.left.section.aliases() and not sides.right.section.aliases():
        return
    right_of: dict[str, str] = {}
    for entry in entries:
        if len(entry.left) == len(entry.right) == 1:
            right_of[entry.left[0]] = entry.right[0]
    yield from _tied_here(sides.left, sides.right, right_of)
    yield from _tied_here(sides.right, sides.left, inverse(right_of))


def _tied_here(side: Side, other: Side, counterpart: Mapping[str, str]) -> Iterator[str]:
    """Yield a note on the second names of a side whose counterparts are separate tensors."""
    untied = []
    other_first = other.section.aliases()
    for key, first_key in side.section.aliases().items():
        name, first_name = counterpart.get(key), counterpart.get(first_key)
        if name is None or first_name is None:
            continue
        if other_first.get(name, name) != other_first.get(first_name, first_name):
            untied.append(f"{key} = {first_key}")
    if untied:
        kind = Note if format_of(other.checkpoint).holds.aliases else Info
        yield kind.about(f"tied in {side.field} only: {{}}", "ties", some(untied))


# Metadata and versions


# transformers writes which library's tensors a safetensors file holds; other formats need no mark
_LIBRARY = "format"


def metadata_notes(sides: BothSides) -> Iterator[str]:
    """Yield a note on the entries of ``__metadata__`` that differ; information if only one of the
    formats has it.
    """
    left, right = sides.left.checkpoint, sides.right.checkpoint
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
    others = other_versions_of(sides.left.section, sides.right.section)
    if not others or sides.has_program:  # programs have no versions
        return [], ""
    cause = "the module versions differ"
    if others[0].is_lost:
        side = sides.right if sides.left.section.modules else sides.left
        cause = f"{side.field} lost its module versions"
    subject, modules = f"{cause} (_metadata)", some(list(map(str, others)))
    if sides.names is not None:  # the model's own loading was compared
        return [Info.about(f"{subject}: {{}}", "module-versions", modules)], ""
    effects = {version.effect for version in others}
    decisive = {Effect.LOADING}
    if _can_have_versions(sides.left) and _can_have_versions(sides.right):
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


def _can_have_versions(side: Side) -> bool:
    """Return whether the section has module versions, or could have them."""
    return bool(side.section.modules) or format_of(side.checkpoint).holds.versions
