"""The document of a diff: one entry for each cause, and the suggested fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from ckpttool.core.text import number, plural
from ckpttool.diffing.history import CHANGES, Step, Steps
from ckpttool.diffing.history import Change as StepChange
from ckpttool.diffing.result import ASPECTS, HARMLESS, NO_VALUES, STATUSES, Compared, Diff, Entry, count_of
from ckpttool.diffing.three_way import BY, Change, Point, Since
from ckpttool.naming.pairing.values import SAME_NAME, Inference, Pair, template
from ckpttool.report.collapse import collapse, first_pattern
from ckpttool.report.document import (
    Block,
    Cell,
    Column,
    Commands,
    Document,
    Facts,
    Inline,
    Listing,
    Note,
    Role,
    Table,
    filled,
    noted,
    shortened,
)
from ckpttool.report.documents.inspection import of_diff

_CALLED = {"other_sections": "other sections", "objects": "non-tensor entries", "code": "the code of the program"}


def coverage(compared: Compared, scope: str) -> tuple[tuple[str, Inline], ...]:
    """Two facts: what was compared, and what was not."""
    called = {aspect: _CALLED.get(aspect, aspect) for aspect in ASPECTS if aspect in compared}
    if "values" in called and scope and scope != NO_VALUES:
        called["values"] = f"values ({scope})"
    said = (
        ", ".join(text for aspect, text in called.items() if compared[aspect] is covered) for covered in (True, False)
    )
    return tuple((label, text) for label, text in zip(("compared", "not compared"), said) if text)


def with_values(verdict: str, compared: Compared, scope: str, equal: bool = False) -> str:
    """The verdict, and what it says of values; `equal` if nothing differs."""
    if "values" not in compared:
        return verdict
    if not compared["values"]:
        return f"{verdict}; values not compared ({scope})"
    within = f" {scope}" if scope else ""
    return f"{verdict}; values are equal{within}" if equal else verdict


_ROWS = 40
_ROLES: dict[str, Role] = {
    "same": "ok",
    "alias": "dim",
    "not_serialized": "dim",
    "extra_state": "dim",
    "renamed": "warn",
}
_CAUSES = "Differences, one line for each cause (--all lists every key)"
_NOT_COUNTED = "Not counted as differences"
_FEW = 2  # details of a cause, of which a cause with more shows none, unless they are shapes
_MEANING = {
    "same": "same key, dtype and shape",
    "renamed": "one tensor under two names",
    "transformed": "computed from other tensors",
    "order": "state that would reach another parameter",
    "alias": "a second name of one tensor",
    "shape": "another shape, or another kind of tensor",
    "dtype": "another dtype",
    "value": "other values",
    "missing": "only right has it",
    "unexpected": "only left has it",
    "not_serialized": "state_dict leaves it out",
    "extra_state": "not a tensor",
}


def document(diff: Diff, *, all: bool = False) -> Document:
    """The document; with `all` every key has a line of its own."""
    counted = [entry for entry in diff.entries if entry.status == "same" or _counts(diff, entry)]
    others = [entry for entry in diff.entries if entry.status != "same" and not _counts(diff, entry)]
    blocks: list[Block] = [
        Facts(
            (
                ("left", Cell(diff.left, "key")),
                ("right", Cell(diff.right, "key")),
                *coverage(diff.compared, diff.scope),
            )
        ),
        _summary(counted),
        _listed("Every key", counted) if all else _causes(_CAUSES, counted),
        (_listed if all else _causes)(_NOT_COUNTED, others),
    ]
    if diff.inferred is not None:
        blocks += [shortened(_suggested(diff.inferred, all), None if all else _ROWS), _ambiguous(diff.inferred, all)]
    blocks += noted(diff.notes, quiet=diff.identical)
    blocks.append(_ignored(diff, all))
    blocks += [Note(f"ignores nothing: {line}", "warning") for line in diff.unused_ignores]
    exchangeable = () if diff.identical else _exchangeable_names(diff)
    if exchangeable:
        blocks.append(Note(_exchangeable(exchangeable), "warning"))
    if diff.fix:
        blocks.append(Commands("what mends it", diff.fix))
    verdict = with_values(_verdict(diff), diff.compared, diff.scope, diff.identical)
    return Document("diff", verdict, diff.passes, filled(blocks), _listing(diff))


def _counts(diff: Diff, entry: Entry) -> bool:
    """Whether the verdict, the summary and the table of causes count the entry as a difference."""
    return entry.status not in HARMLESS if diff.identical else diff.weighs(entry)


def _verdict(diff: Diff) -> str:
    if diff.failing_ignores:
        unused = plural(diff.failing_ignores, "unused ignore entry")
        return f"{unused} (--fail-on-unused); {_verdict(replace(diff, accepted=True, failing_ignores=0))}"
    if diff.identical:
        same = "the models are the same" if diff.aside else "the same"
        count = sum(_counts(diff, entry) for entry in diff.entries)
        return same if not count else f"fits, with {plural(count, 'difference')} that loading takes care of"
    weighing = [entry for entry in diff.entries if diff.weighs(entry)]
    ignored = sum(entry.ignored is not None for entry in weighing)
    if diff.accepted:
        others = len(weighing) - ignored
        parts = [f"{number(ignored)} ignored"] * bool(ignored) + [f"{number(others)} not in --fail-on"] * bool(others)
        return f"not the same: {plural(len(weighing), 'difference')}, accepted ({', '.join(parts)})"
    if not weighing:
        return diff.beyond or "not the same"
    said = plural(len(weighing), "difference") + (f", {number(ignored)} of them ignored" if ignored else "")
    pairs = 0 if diff.inferred is None else len(diff.inferred.pairs)
    return f"{said} ({plural(pairs, 'pair')} may be the same tensor{'s' * (pairs != 1)})" if pairs else said


def _ignored(diff: Diff, all: bool) -> Table:
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in diff.entries:
        if entry.ignored is not None:
            groups.setdefault((entry.status, entry.ignored), []).append(entry)
    rows = tuple(
        (
            Cell(status, "dim"),
            number(len(group)),
            first_pattern((key for e in group for key in e.left or e.right), all),
            reason,
        )
        for (status, reason), group in groups.items()
    )
    columns = (Column("status"), Column("entries", "number"), Column("key", "key"), Column("why it is ignored"))
    return Table("Ignored, and not the same", columns, rows)


def _listing(diff: Diff) -> Listing:
    """Every entry; those that are the same are hidden at first where there are others."""
    roles = {status: _ROLES.get(status, "bad") for status in diff.summary}
    return Listing(
        (diff.left, diff.right), roles, partial(of_diff, diff), frozenset({"same"} if len(roles) > 1 else ())
    )


def _summary(counted: Iterable[Entry]) -> Table:
    counts = count_of(STATUSES, Counter(entry.status for entry in counted))
    rows = tuple((Cell(status, _ROLES.get(status, "bad")), number(n), _MEANING[status]) for status, n in counts.items())
    return Table("Summary", (Column("status"), Column("entries", "number"), Column("meaning")), rows)


def _causes(title: str, entries: Iterable[Entry]) -> Table:
    """A row for each status and cause: how often, why, by which hook, and its keys, repeated layers on one line.

    What is ignored has rows of its own: what fails stands in no row behind it.
    """
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        if entry.status != "same":
            hook = entry.hook and (entry.hook.function, entry.hook.file, entry.hook.line)
            groups.setdefault((entry.status, entry.reason, hook, entry.ignored is None), []).append(entry)
    rows = [_cause(group) for group in groups.values()]
    columns = (
        Column("status"),
        Column("entries", "number"),
        Column("why"),
        Column("left", "key"),
        Column("right", "key"),
    )
    return Table(title, columns, tuple(rows))


def _cause(group: Sequence[Entry]) -> tuple[str | Cell, ...]:
    first = group[0]
    why = first.why
    details = list(dict.fromkeys(entry.detail for entry in group if entry.detail is not None))
    if 0 < len(details) <= _FEW:
        why += f": {', '.join(details)}"
    elif details and first.status == "shape":
        why += f": {', '.join(details[:_FEW])}, and {len(details) - _FEW} more"
    sides = [first_pattern(key for entry in group for key in getattr(entry, side)) for side in ("left", "right")]
    return (Cell(first.status, _ROLES.get(first.status, "bad")), number(len(group)), why, *sides)


def _suggested(inferred: Inference, all: bool) -> Table:
    """A row for each kind of pair, with layer numbers as ranges, and what speaks for it; one for all with one name.

    With `all` each pair has its own.
    """
    groups: dict[object, list[Pair]] = {}
    for pair in inferred.pairs:
        by_name = pair.evidence.startswith(SAME_NAME)  # which says all of the pair
        kind = "" if by_name else tuple(template(key)[0] for key in (*pair.left, *pair.right))
        groups.setdefault(pair if all else (kind, pair.evidence, pair.transposed), []).append(pair)
    rows = tuple(
        (
            number(len(group)),
            *(_joined(getattr(p, side) for p in group) for side in ("left", "right")),
            _evidence(group[0]),
        )
        for group in groups.values()
    )
    columns = (Column("pairs", "number"), Column("left", "key"), Column("right", "key"), Column("evidence"))
    return Table("Suggested: likely one tensor under two names; nothing above rests on it", columns, rows)


def _joined(sides: Iterable[tuple[str, ...]]) -> str:
    """The parts of one side, each with its layers on one line."""
    return " + ".join(first_pattern(keys) for keys in zip(*sides))


def _evidence(pair: Pair) -> str:
    return pair.evidence + (f"; stored transposed in {pair.transposed}" if pair.transposed else "")


def _ambiguous(inferred: Inference, all: bool) -> Table:
    rows = tuple(
        (first_pattern(one.left, all), first_pattern(one.right, all), one.reason) for one in inferred.ambiguous
    )
    columns = (Column("left", "key"), Column("right", "key"), Column("why"))
    return Table("Ambiguous matches", columns, rows)


def _exchangeable_names(diff: Diff) -> tuple[tuple[str, ...], ...]:
    """Return the groups in which some key has no counterpart, or has it under another name: it could be any of them."""
    unsure = {key for e in diff.entries if e.status in ("missing", "renamed") for key in e.right}
    return tuple(group for group in diff.exchangeable if not unsure.isdisjoint(group))


def _exchangeable(names: tuple[tuple[str, ...], ...]) -> str:
    """Which tensors only their names tell apart, those of one shape as an example."""
    count = sum(map(len, names))
    groups = collapse((key, None) for key in names[0])
    example = ", ".join(group.pattern for group in groups)
    return (
        f"{plural(count, 'tensor')} could be exchanged with others of their layer without any shape error, "
        f"as {example}: only their names tell them apart"
    )


def _listed(title: str, entries: Iterable[Entry]) -> Table:
    rows = tuple(
        (
            Cell(entry.status, _ROLES.get(entry.status, "bad")),
            first_pattern(entry.left, all=True),
            first_pattern(entry.right, all=True),
            ": ".join(filter(None, (entry.reason, str(entry.hook or ""), entry.detail))),
        )
        for entry in entries
    )
    columns = (Column("status"), Column("left", "key"), Column("right", "key"), Column("why"))
    return Table(title, columns, rows, is_listed=True)


_SINCE_ROLES: dict[str, Role] = {"left": "ok", "right": "ok", "both": "dim", "conflict": "bad"}
_SINCE_MEANING = {
    "left": "changed on the left only",
    "right": "changed on the right only",
    "both": "changed on both sides, and these agree",
    "conflict": "changed on both sides, and these do not agree",
}


def three_way_document(found: Since, *, all: bool = False) -> Document:
    """The document; with `all` every key has a line of its own."""
    sides = (("base", found.base), ("left", found.left), ("right", found.right))
    conflicts = found.summary.get("conflict", 0)
    verdict = plural(conflicts, "conflict") if conflicts else "no conflicts" if found.points else "nothing changed"
    verdict = with_values(verdict, found.compared, found.scope, not found.points)
    rows = tuple((Cell(by, _SINCE_ROLES[by]), number(count), _SINCE_MEANING[by]) for by, count in found.summary.items())
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
            Cell(group[0].by, _SINCE_ROLES[group[0].by]),
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


_STEPS_ROLES: dict[str, Role] = {"renamed": "warn"}
_OF_CLASS = "what the one class has and the other has not"
Row = tuple["str | Cell", ...]


def history_document(found: Steps, *, all: bool = False) -> Document:
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
    verdict = with_values(_verdict_steps(found), found.compared, found.scope, found.identical)
    return Document("diff", verdict, found.passes, tuple(blocks))


def _verdict_steps(found: Steps) -> str:
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
    groups: dict[tuple[str, str, str, StepChange | None], list[StepChange]] = {}
    other_class = {change.section for change in step.changes if change.status == "class"}
    for change in step.changes:
        by_class = change.section in other_class and change.status in CHANGES.values()
        why = change.reason if all or not by_class else _OF_CLASS
        groups.setdefault((change.section, change.status, why, change if all else None), []).append(change)
    for (_, _, why, _), group in groups.items():
        yield _cause_steps(step.name, group, why, all)
    likely: dict[str | Pair, list[Pair]] = {}
    for pair in step.likely:
        likely.setdefault(pair if all else pair.evidence, []).append(pair)
    for pairs in likely.values():
        before = first_pattern((key for pair in pairs for key in pair.right), all)
        now = first_pattern((key for pair in pairs for key in pair.left), all)
        yield (step.name, Cell("renamed?", "warn"), number(len(pairs)), before, now, pairs[0].evidence)


def _cause_steps(name: str, group: Sequence[StepChange], reason: str, all: bool) -> Row:
    first = group[0]
    details = list(dict.fromkeys(change.detail for change in group if change.detail is not None))
    shown = ", ".join(details[:_FEW]) + (f", and {number(len(details) - _FEW)} more" if len(details) > _FEW else "")
    why = ": ".join(filter(None, (first.section, reason, shown)))
    before = first_pattern((key for change in group for key in change.before), all)
    now = first_pattern((key for change in group for key in change.after), all)
    return (name, Cell(first.status, _STEPS_ROLES.get(first.status, "bad")), number(len(group)), before, now, why)
