"""Two checkpoints and the one that both came from: what each side changed since, and whether they agree.

Each side is compared with the base, and both with each other: nothing is decided here that `run` does not say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.core.options import expand_options
from ckpttool.core.schema import COUNT, FLAG, TEXT, TEXTS, list_of, nullable, object_of, one_of, record
from ckpttool.core.values import dataclass, public
from ckpttool.diffing.checkpoints import ask, dealt
from ckpttool.diffing.manifest import is_about_manifest
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.result import COMPARED, STATUSES, Compared, Diff, Entry, count_of, with_sides
from ckpttool.diffing.run import run
from ckpttool.distributed.job import only_first
from ckpttool.operands.checkpoint import Ckpt, open_checkpoint
from ckpttool.operands.model import operand_of
from ckpttool.operands.sections import read_for_model

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.keywords import DiffKeywords

By = Literal["left", "right", "both", "conflict"]
Keys = tuple[str, ...]
BY = ("left", "right", "both", "conflict")
# How an entry of a diff between the base and a side is called, where it is not by its status.
CHANGES = {"unexpected": "dropped", "missing": "added"}
_UNTOUCHED = frozenset({"same", "extra_state", "not_serialized"})
_CONTENT = frozenset({"value", "dtype", "shape"})


@dataclass(frozen=True, slots=True)
class Change:
    """What one side made of keys of the base: its own keys, empty where it dropped them."""

    status: str
    keys: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Point:
    """Keys of the base, none for what is new, and who changed them; None is a side that left them as they were.

    `by` is ``both`` where the two agree: they hold the same there now, or one changed the name and the other what
    stands under it; ``conflict`` where they do not.
    """

    by: By
    base: tuple[str, ...]
    left: Change | None
    right: Change | None


@public
@dataclass(frozen=True, slots=True)
class Since:
    """The answer: every change since the base. `passes` where no two of them are in each other's way."""

    base: str
    left: str
    right: str
    points: tuple[Point, ...]
    notes: tuple[str, ...]
    compared: Compared = field(default_factory=dict, compare=False)
    scope: str = ""

    @property
    def summary(self) -> dict[str, int]:
        """Who changed it -> how often, without zeros."""
        return count_of(BY, Counter(point.by for point in self.points))

    @property
    def conflicts(self) -> bool:
        """Whether two changes are in each other's way."""
        return "conflict" in self.summary

    @property
    def passes(self) -> bool:
        """Whether the exit status is 0."""
        return not self.conflicts

    def to_json(self) -> dict[str, Any]:
        """The `since` object of the contract."""
        return dict(SINCE.write(self))


_CHANGE = nullable(record(Change, {"status": one_of(*STATUSES, *CHANGES.values()), "keys": TEXTS, "reason": TEXT}))
_POINT = record(Point, {"by": one_of(*BY), "base": TEXTS, "left": _CHANGE, "right": _CHANGE})
SINCE = record(
    Since,
    {
        **dict.fromkeys(("base", "left", "right"), TEXT),
        "conflicts": FLAG,
        "compared": COMPARED,
        "summary": object_of({}, dict.fromkeys(BY, COUNT)),
        "entries": list_of(_POINT),
        "notes": TEXTS,
    },
    called={"entries": "points"},
    title="ckpttool.since/1",
)


@expand_options(DiffOptions)
def since(base: Ckpt, left: Ckpt, right: Ckpt, **options: Unpack[DiffKeywords]) -> Since:
    """Return what two checkpoints each changed since the one that both came from, and whether the changes agree."""
    chosen = DiffOptions(**options)
    if chosen.comparison is None:
        only_first()
    three = open_checkpoint(base), open_checkpoint(left), open_checkpoint(right)
    with chosen.comparing(*three, *three):  # each is compared with each
        return compare_since(*three, chosen)


def compare_since(base: Checkpoint, left: Checkpoint, right: Checkpoint, options: DiffOptions) -> Since:
    """What `left` and `right` changed since `base`.

    Raises `CkptError` as a diff does, and for a manifest.
    """
    if is_about_manifest(base, left) or is_about_manifest(base, right):
        raise CkptError("a manifest is no base, and has none", hint="name the checkpoints themselves")
    model = operand_of(options)
    base, left, right = (read_for_model(checkpoint, model) for checkpoint in (base, left, right))
    pairs = (base, left), (base, right), (left, right)
    values = dealt(options.comparison, *(partial(ask, *pair, model) for pair in pairs))
    mine, theirs, both = (run(*pair, options, model, values) for pair in pairs)
    points = tuple(_points(mine, theirs, both))
    sides = (("left", mine), ("right", theirs))
    since_base = [f"{side}: {_of_three(note)}" for side, diff in sides for note in diff.notes]
    notes = (*since_base, *both.notes)
    compared = {
        aspect: all(diff.compared.get(aspect, True) for diff in (mine, theirs, both)) for aspect in both.compared
    }
    return Since(base.source, left.source, right.source, points, notes, compared, options.scope)


def _points(mine: Diff, theirs: Diff, both: Diff) -> Iterator[Point]:
    ours, others = _changes(mine), _changes(theirs)
    alike = {(entry.left, entry.right) for entry in both.entries if not both.weighs(entry)}
    for base in dict.fromkeys((*ours, *others)):
        left, right = ours.get(base), others.get(base)
        yield Point(_by(base, left, right, alike), base, left, right)
    added, more = _added(mine), _added(theirs)
    for keys in dict.fromkeys((*added, *more)):
        yield Point(_by((), added.get(keys), more.get(keys), alike), (), added.get(keys), more.get(keys))
    yield from _collisions(ours, added, others, more)


def _by(base: Keys, left: Change | None, right: Change | None, alike: set[tuple[Keys, Keys]]) -> By:
    """Who changed `base`; one side's new name and the other's new content under the old name go together."""
    if left is None or right is None:
        return "right" if left is None else "left"
    if left.keys == right.keys:
        return "both" if not left.keys or (left.keys, right.keys) in alike else "conflict"
    apart = {left.status, right.status} & {"renamed"} and {left.status, right.status} & _CONTENT
    kept = right.keys if left.status == "renamed" else left.keys
    return "both" if apart and kept == base else "conflict"


def _changes(diff: Diff) -> dict[Keys, Change]:
    """Keys of the base -> what the side made of each of them."""
    touched = (e for e in diff.entries if e.left and e.status not in _UNTOUCHED and diff.weighs(e))
    return {(key,): _change(entry) for entry in touched for key in entry.left}


def _added(diff: Diff) -> dict[Keys, Change]:
    """New keys -> that they are new."""
    return {entry.right: _change(entry) for entry in diff.entries if not entry.left}


def _change(entry: Entry) -> Change:
    if entry.status in CHANGES:
        return Change(CHANGES[entry.status], entry.right, "")
    return Change(entry.status, entry.right, _of_three(": ".join(filter(None, (entry.why, entry.detail)))))


def _of_three(text: str) -> str:
    """What a diff of the base (its left) and a side (its right) says."""
    return with_sides(text, "the base", "this side")


def _collisions(
    ours: dict[Keys, Change], added: dict[Keys, Change], others: dict[Keys, Change], more: dict[Keys, Change]
) -> Iterator[Point]:
    """One key that the two sides gave to different tensors: renamed from others of the base, or new."""
    mine, theirs = (_given(*pair) for pair in ((ours, added), (others, more)))
    for key in (key for key in mine if key in theirs):
        (base, left), (origin, right) = mine[key], theirs[key]
        if base != origin:
            yield Point("conflict", tuple(dict.fromkeys((*base, *origin))), left, right)


def _given(changes: dict[Keys, Change], added: dict[Keys, Change]) -> dict[str, tuple[Keys, Change]]:
    """Key -> what of the base has it now that had another one, and how that came."""
    moved = {key: (base, change) for base, change in changes.items() for key in change.keys if key not in base}
    return {**moved, **{key: ((), change) for keys, change in added.items() for key in keys}}
