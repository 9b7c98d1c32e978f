"""The document of a diff over time: a line for each step that changed something and each cause, the others folded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ckpttool.naming.inference.values import Pair
from ckpttool.queries.diff.steps import CHANGES, Change, Step, Steps
from ckpttool.report.collapse import first_pattern
from ckpttool.report.document import Block, Cell, Column, Document, Facts, Note, Role, Table
from ckpttool.report.documents.coverage import coverage, with_values
from ckpttool.words import number, plural

_ROLES: dict[str, Role] = {"renamed": "warn"}
_OF_CLASS = "what the one class has and the other has not"
_FEW = 2  # details of a cause that are shown
Row = tuple["str | Cell", ...]


def document(found: Steps, *, all: bool = False) -> Document:
    """The document; with `all` every key and every step has a line of its own."""
    columns = (Column("step", "key"), Column("change"), Column("keys", "number"))
    more = (Column("before", "key"), Column("now", "key"), Column("why"))
    blocks: list[Block] = [
        Facts(
            (
                *([("run", Cell(found.run, "key"))] if found.run else []),
                *coverage(found.compared, found.scope),
            )
        ),
        Table("Steps", (*columns, *more), tuple(_rows(found.steps, all))),
        *(Note(note) for note in found.notes),
    ]
    verdict = with_values(_verdict(found), found.compared, found.scope, found.identical)
    return Document("diff", verdict, found.passes, tuple(blocks))


def _verdict(found: Steps) -> str:
    changed, unread = (sum(map(bool, of)) for of in zip(*((s.changes, s.error) for s in found.steps)))
    steps = plural(len(found.steps), "step")
    said = f"{number(changed)} of {steps} changed something" if changed else f"nothing changed in {steps}"
    return f"{said}, {number(unread)} could not be read" if unread else said


def _rows(steps: Sequence[Step], all: bool) -> Iterator[Row]:
    for quiet, group in groupby(steps, key=lambda step: step.is_as_before):
        own = list(group)
        if quiet:
            for part in [[step] for step in own] if all else [own]:
                yield _nothing(part)
            continue
        for step in own:
            yield from _of(step, all)


def _nothing(steps: Sequence[Step]) -> Row:
    first, last = steps[0].name, steps[-1].name
    named = first if len(steps) == 1 else f"{first} ... {last} ({number(len(steps))} steps)"
    return (named, Cell("nothing", "ok"), "", "", "", "")


def _of(step: Step, all: bool) -> Iterator[Row]:
    if step.error:
        yield (step.name, Cell("not read", "bad"), "", "", "", step.error)
    elif step.since is None:
        yield (step.name, Cell("the first", "dim"), number(step.tensors), "", "", "")
    groups: dict[tuple[str, str, str, Change | None], list[Change]] = {}
    other_class = {change.section for change in step.changes if change.status == "class"}
    for change in step.changes:
        by_class = change.section in other_class and change.status in CHANGES.values()
        why = change.reason if all or not by_class else _OF_CLASS
        groups.setdefault((change.section, change.status, why, change if all else None), []).append(change)
    for (_, _, why, _), group in groups.items():
        yield _cause(step.name, group, why, all)
    likely: dict[str | Pair, list[Pair]] = {}
    for pair in step.likely:
        likely.setdefault(pair if all else pair.evidence, []).append(pair)
    for pairs in likely.values():
        before = first_pattern((key for pair in pairs for key in pair.right), all)
        now = first_pattern((key for pair in pairs for key in pair.left), all)
        yield (step.name, Cell("renamed?", "warn"), number(len(pairs)), before, now, pairs[0].evidence)


def _cause(name: str, group: Sequence[Change], reason: str, all: bool) -> Row:
    first = group[0]
    details = list(dict.fromkeys(change.detail for change in group if change.detail is not None))
    shown = ", ".join(details[:_FEW]) + (f", and {number(len(details) - _FEW)} more" if len(details) > _FEW else "")
    why = ": ".join(filter(None, (first.section, reason, shown)))
    before = first_pattern((key for change in group for key in change.before), all)
    now = first_pattern((key for change in group for key in change.after), all)
    return (name, Cell(first.status, _ROLES.get(first.status, "bad")), number(len(group)), before, now, why)
