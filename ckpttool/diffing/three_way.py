"""Compare two checkpoints with the base that both came from: what each side changed, and whether they agree.

Each side is compared with the base, and both with each other, by `run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.core.options import expand_options
from ckpttool.core.text import placed
from ckpttool.diffing.checkpoints import compare_on_ranks, read_all_values
from ckpttool.diffing.options import Diff3Options, DiffOptions
from ckpttool.diffing.result import SIDE_STATUSES, By, Diff, Diff3, Entry, Point, SideChange
from ckpttool.diffing.run import is_about_manifest, run
from ckpttool.distributed.job import only_first
from ckpttool.operands.checkpoint import Ckpt, open_checkpoint
from ckpttool.operands.model import operand_of, read_for_model

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.keywords import Diff3Keywords

Keys = tuple[str, ...]
_UNTOUCHED = frozenset({"same", "extra_state", "not_serialized"})
_CONTENT = frozenset({"value", "dtype", "shape"})


@expand_options(Diff3Options)
def diff3(base: Ckpt, left: Ckpt, right: Ckpt, **options: Unpack[Diff3Keywords]) -> Diff3:
    """Return the changes of two checkpoints since their common base, and whether these agree."""
    chosen = DiffOptions(**options)
    if chosen.comparison is None:
        only_first()
    three = open_checkpoint(base), open_checkpoint(left), open_checkpoint(right)
    with chosen.comparing(*three, *three):  # each is compared with each
        return compare_with_base(*three, chosen)


def compare_with_base(base: Checkpoint, left: Checkpoint, right: Checkpoint, options: DiffOptions) -> Diff3:
    """Return what `left` and `right` changed since `base`. Raises `CkptError` as a diff does, and for a manifest."""
    if is_about_manifest(base, left) or is_about_manifest(base, right):
        raise CkptError("a manifest has no values to compare with a base", hint="name the checkpoints themselves")
    model = operand_of(options)
    base, left, right = (read_for_model(checkpoint, model) for checkpoint in (base, left, right))
    pairs = (base, left), (base, right), (left, right)
    values = compare_on_ranks(options.comparison, *(partial(read_all_values, *pair, model) for pair in pairs))
    mine, theirs = (run(*pair, options, model, values, sides=_SIDES) for pair in pairs[:2])
    both = run(left, right, options, model, values)
    notes = [placed(side, note) for side, diff in (("left", mine), ("right", theirs)) for note in diff.notes]
    compared = {
        aspect: all(diff.compared.get(aspect, True) for diff in (mine, theirs, both)) for aspect in both.compared
    }
    points = tuple(_points(mine, theirs, both))
    return Diff3(base.source, left.source, right.source, points, (*notes, *both.notes), compared, options.scope)


_SIDES = ("the base", "this side")


def _points(mine: Diff, theirs: Diff, both: Diff) -> Iterator[Point]:
    same = {(entry.left, entry.right) for entry in both.entries if not both.is_difference(entry)}
    sides = []
    for diff in (mine, theirs):
        # Keys of the base, one at a time, and new keys, which come from no key of the base
        changed = (e for e in diff.entries if e.left and e.status not in _UNTOUCHED and diff.is_difference(e))
        changes: dict[Keys, SideChange] = {(key,): _change(entry) for entry in changed for key in entry.left}
        added = {entry.right: _change(entry) for entry in diff.entries if not entry.left}
        sides.append((changes, added))
    (left, left_added), (right, right_added) = sides
    for base in dict.fromkeys((*left, *right)):
        yield Point(_by(base, left.get(base), right.get(base), same), base, left.get(base), right.get(base))
    for keys in dict.fromkeys((*left_added, *right_added)):
        change, other = left_added.get(keys), right_added.get(keys)
        yield Point(_by((), change, other, same), (), change, other)

    # One key that the two sides gave to different tensors: renamed from other keys of the base, or new
    given, other_given = (_given(changes, added) for changes, added in sides)
    for key in (key for key in given if key in other_given):
        (base, change), (origin, other_change) = given[key], other_given[key]
        if base != origin:
            yield Point("conflict", tuple(dict.fromkeys((*base, *origin))), change, other_change)


def _by(base: Keys, left: SideChange | None, right: SideChange | None, same: set[tuple[Keys, Keys]]) -> By:
    """Return who changed `base`. A new name on one side and new content on the other do not conflict."""
    if left is None or right is None:
        return "right" if left is None else "left"
    if left.keys == right.keys:
        return "both" if not left.keys or (left.keys, right.keys) in same else "conflict"
    statuses = {left.status, right.status}
    kept = right.keys if left.status == "renamed" else left.keys
    return "both" if "renamed" in statuses and statuses & _CONTENT and kept == base else "conflict"


def _change(entry: Entry) -> SideChange:
    if entry.status in SIDE_STATUSES:
        return SideChange(SIDE_STATUSES[entry.status], entry.right, "")
    return SideChange(entry.status, entry.right, ": ".join(filter(None, (entry.why(_SIDES), entry.detail))))


def _given(changes: dict[Keys, SideChange], added: dict[Keys, SideChange]) -> dict[str, tuple[Keys, SideChange]]:
    """Map each key that a tensor of the base did not have before, or that is new, to where it comes from."""
    moved = {key: (base, change) for base, change in changes.items() for key in change.keys if key not in base}
    return {**moved, **{key: ((), change) for keys, change in added.items() for key in keys}}
