"""The document of a diff of three: who changed what since the base, and where two changes are in each other's way."""

from __future__ import annotations

from ckpttool.queries.diff.since import BY, Change, Point, Since
from ckpttool.report.collapse import first_pattern
from ckpttool.report.document import Block, Cell, Column, Document, Facts, Role, Table, filled, noted
from ckpttool.report.documents.coverage import coverage, with_values
from ckpttool.words import number, plural

_ROLES: dict[str, Role] = {"left": "ok", "right": "ok", "both": "dim", "conflict": "bad"}
_MEANING = {
    "left": "changed on the left only",
    "right": "changed on the right only",
    "both": "changed on both sides, and these agree",
    "conflict": "changed on both sides, and these do not agree",
}


def document(found: Since, *, all: bool = False) -> Document:
    """The document; with `all` every key has a line of its own."""
    sides = (("base", found.base), ("left", found.left), ("right", found.right))
    conflicts = found.summary.get("conflict", 0)
    verdict = plural(conflicts, "conflict") if conflicts else "no conflicts" if found.points else "nothing changed"
    verdict = with_values(verdict, found.compared, found.scope, not found.points)
    rows = tuple((Cell(by, _ROLES[by]), number(count), _MEANING[by]) for by, count in found.summary.items())
    blocks: list[Block] = [
        Facts((*((side, Cell(source, "key")) for side, source in sides), *coverage(found.compared, found.scope))),
        Table("Summary", (Column("by"), Column("changes", "number"), Column("meaning")), rows),
        _changes(found, all),
        *noted(found.notes, quiet=found.passes),
    ]
    return Document("diff", verdict, found.passes, filled(blocks))


def _changes(found: Since, all: bool) -> Table:
    """A row for each who and how, repeated layers on one line."""
    groups: dict[object, list[Point]] = {}
    for point in sorted(found.points, key=lambda point: -BY.index(point.by)):
        kind = point if all else (point.by, *(one and (one.status, one.reason) for one in (point.left, point.right)))
        groups.setdefault(kind, []).append(point)
    rows = tuple(
        (
            Cell(group[0].by, _ROLES[group[0].by]),
            number(len(group)),
            first_pattern((key for point in group for key in point.base), all),
            _side([point.left for point in group], all),
            _side([point.right for point in group], all),
        )
        for group in groups.values()
    )
    columns = (Column("by"), Column("changes", "number"), Column("base", "key"), Column("left"), Column("right"))
    return Table("Changes since the base", columns, rows)


def _side(changes: list[Change | None], all: bool) -> str:
    """What one side did: the status, the keys that it has now, and why."""
    first = changes[0]
    if first is None:
        return "-"
    keys = [key for change in changes if change is not None for key in change.keys]
    named = f"{first.status} {first_pattern(keys, all)}" if keys else first.status
    return f"{named}: {first.reason}" if first.reason else named
