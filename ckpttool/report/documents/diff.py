"""The documents of `diff`: one line for each cause, and the suggested fix."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from math import inf, isfinite
from typing import NamedTuple

from ckpttool.core.tables import positions
from ckpttool.core.text import Info, code_of, notes_with, number, plural
from ckpttool.diffing.result import ASPECTS, HARMLESS, Asks, Compared, Diff, Entry, alike
from ckpttool.evaluate.compare import Change
from ckpttool.naming.evidence import Pair
from ckpttool.report.collapse import first_pattern, patterns
from ckpttool.report.document import (
    Block,
    Cell,
    Column,
    Commands,
    Document,
    Facts,
    Finding,
    Inline,
    KeyGroup,
    Keys,
    Listing,
    Pairing,
    Paragraph,
    Role,
    Row,
    Table,
    facts,
    filled,
    key_group,
    kind_facts,
    noted,
    shortened,
    with_names,
)
from ckpttool.report.documents.answer import LikelyRenames, answer, counted, summary
from ckpttool.report.documents.inspection import outlined

_ROWS = 8  # rows of a cause
# codes of notes that the label of the fix says
_SAID_BY_FIX = ("partial-fix", "untried", "old-code")
# codes of notes on what kind of file it is, which come before everything else
_OF_KIND = ("adapter", "rank-part", "nothing-matched")
# codes of differences that no other fact explains: the answer says how many there are
_UNEXPLAINED = ("missing", "unexpected", "shape", "value")
# the names of the two sides in the footer
_SIDES: dict[Asks, tuple[str, str]] = {
    "load": ("checkpoint", "model"),
    "names": ("saved", "runtime"),
    "drift": ("names file", "model"),
    "optimizer": ("checkpoint", "optimizer"),
    "pair": ("left", "right"),
    "adapter": ("adapter", "model"),
}
_ROLES: dict[str, Role] = {
    "same": "ok",
    "alias": "dim",
    "not_serialized": "dim",
    "extra_state": "dim",
    "renamed": "warn",
}
_LEFT, _RIGHT, _WHY = Column("left", "key"), Column("right", "key"), Column("why")
_CHANGED = (
    Column("tensors", "key"),
    Column("relative", "number"),
    Column("norm", "number"),
    Column("maximum", "number"),
    Column("changed", "number"),
    Column("not finite"),
    Column("most in", "key"),
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")  # of a layer
_STATUS, _ENTRIES = Column("status"), Column("entries", "number")


def coverage(compared: Compared, scope: str) -> tuple[tuple[str, Inline], ...]:
    """Return the compared aspects and the others, as two facts."""
    titles = {
        "other_sections": "other sections",
        "objects": "non-tensor entries",
        "code": "the code of the program",
    }
    if scope:
        titles["values"] = f"values ({scope})"
    yes: list[str] = []
    no: list[str] = []
    for aspect in ASPECTS:
        if aspect in compared:
            aspects = yes if compared[aspect] else no
            aspects.append(titles.get(aspect, aspect))
    return facts(("compared", ", ".join(yes)), ("not compared", ", ".join(no))).pairs


def document(diff: Diff, *, all: bool = False) -> Document:
    """Return the document; with `all` every key has its own line."""
    uncounted = _uncounted(diff)
    entries: list[Entry] = []
    others: list[Entry] = []
    for group in alike(diff.entries):
        kind = others if group[0].is_one_of(uncounted) else entries
        kind.extend(group)
    renames = LikelyRenames.of(diff)
    counts = counted(entries, renames)
    unpaired = [entry for entry in entries if not renames.explain(entry)]
    lead = _lead(diff, unpaired, renames.pairs, all)
    notes = [note for note in diff.notes if note not in lead.said]
    blocks: list[Block] = [
        _likely_renames(diff, renames.pairs, all),
        Keys("Every key" if all else "", _groups(unpaired, diff, all), is_listed=all),
        _changes(diff, all),
        Keys("Not counted as differences", _groups(others, diff, all)),
        _ambiguous(diff, all),
        *noted(notes, quiet=diff.identical, names=diff.names),
        _accepted(diff, all),
    ]
    for line in diff.unused_ignores:
        blocks.append(Paragraph(f"unused ignore entry: {line}", "warning"))
    if not diff.identical:
        blocks += _exchangeable(diff, entries)
    blocks.append(_compared(diff, counts))
    names = diff.names[:1] if diff.asks == "names" else diff.names
    title = " ".join(("diff", *names))
    sentence = answer(diff, counts)
    listing = _listing(diff)
    return Document(title, sentence, diff.passes, filled(blocks), listing, tuple(lead.blocks))


def _listing(diff: Diff) -> Listing:
    """Return every key; equal ones are hidden at first if others differ."""
    roles = {status: _ROLES.get(status, "bad") for status in diff.summary}
    quiet = frozenset({"same"}) if len(roles) > 1 else frozenset[str]()
    return Listing((diff.left, diff.right), roles, partial(findings, diff), quiet)


def _changes(diff: Diff, all: bool) -> Table:
    """Return how far values changed, the largest relative change first: a row for the tensors of
    all layers with one name, with the tensor that changed most; with `all` a row for each tensor.
    """
    most_changed: dict[str, tuple[float, str, Change]] = {}
    for entry in diff.entries:
        if entry.status != "value" or entry.change is None or not entry.right:
            continue
        key = entry.right[0]
        name = key if all else _NUMBER.sub("{}", key)
        extent = _extent(entry.change)
        if name not in most_changed or extent > most_changed[name][0]:
            most_changed[name] = (extent, key, entry.change)
    extents = [extent for extent, _, _ in most_changed.values()]
    largest = max(filter(isfinite, extents), default=0.0)
    rows: list[Row] = []
    for name in sorted(most_changed, key=lambda name: -most_changed[name][0]):
        _, key, change = most_changed[name]
        rows.append(_change_row(name, key, change, largest))
    table = Table("Values, by relative change", _CHANGED, tuple(rows))
    return table if all else shortened(table, _ROWS)


def _extent(change: Change) -> float:
    """Return the relative change; what became NaN or infinite, or was 0, comes first."""
    new = change.nan_right + change.infinite_right - change.nan_left - change.infinite_left
    return inf if change.relative is None or new > 0 else change.relative


def _short(size: float | None) -> str:
    return "-" if size is None else f"{size:.2g}"


def _change_row(name: str, worst: str, change: Change, largest: float) -> Row:
    """Return the row of the tensors `name`; `largest` is the largest finite relative change."""
    not_finite = [
        _not_finite(change.nan_left, change.nan_right, "NaN"),
        _not_finite(change.infinite_left, change.infinite_right, "infinite"),
    ]
    bar = min(_extent(change) / largest, 1) if largest else 1.0
    return (
        name,
        Cell(_short(change.relative), "number", bar),
        _short(change.norm),
        _short(change.maximum),
        _share(change.differing, change.elements),
        ", ".join(filter(None, not_finite)),
        worst if worst != name else "",
    )


def _not_finite(left: int, right: int, kind: str) -> str:
    """Return how many elements of a kind the right has, and the left if it has another number."""
    if left == right:
        return f"{number(right)} {kind}" if right else ""
    return f"{number(left)} -> {number(right)} {kind}"


def _share(differing: int, elements: int) -> str:
    """Return the share in percent: 0% if nothing differs, and 100% if everything does."""
    percent = round(100 * differing / elements)
    if percent == 0 and differing:
        return "<1%"
    if percent == 100 and differing < elements:
        return ">99%"
    return f"{percent}%"


def _likely_renames(diff: Diff, likely: Iterable[Pair], all: bool) -> Keys:
    """Return the pairs of likely renames, a group for each evidence."""
    by_evidence: dict[tuple[str, str], list[Pairing]] = {}
    for pair in likely:
        pairs = by_evidence.setdefault((pair.evidence, pair.transposed), [])
        pairs.append((pair.left, pair.right, ""))
    groups = []
    for (evidence, transposed), pairs in by_evidence.items():
        heading = f"likely renames: {plural(len(pairs), 'pair')}, inferred: {evidence}"
        if transposed:
            side = diff.names[0] if transposed == "left" else diff.names[1]
            heading += f"; stored transposed in {side}"
        groups.append(_group(heading, pairs, all, "pairs", "warn"))
    return Keys("", tuple(groups))


def _ambiguous(diff: Diff, all: bool) -> Table:
    rows: list[Row] = []
    if diff.inferred is not None:
        for match in diff.inferred.ambiguous:
            left, right = first_pattern(match.left, all), first_pattern(match.right, all)
            rows.append((left, right, match.reason))
    return Table("Ambiguous matches", (_LEFT, _RIGHT, _WHY), tuple(rows))


def _exchangeable(diff: Diff, counted: Iterable[Entry]) -> list[Paragraph]:
    """Return a note on tensors that could be swapped without an error."""
    # A key without a counterpart, or under another name, could be any of those with its shape.
    unsure: set[str] = set()
    for entry in counted:
        if entry.left != entry.right:
            unsure.update(entry.right)
    groups = [group for group in diff.exchangeable if not unsure.isdisjoint(group)]
    if not groups:
        return []
    tensors = sum(map(len, groups))
    have = "has" if tensors == 1 else "have"
    example = ", ".join(patterns(groups[0]))
    text = (
        f"{plural(tensors, 'tensor')} {have} the same shape as a neighbor, so a swap would not be"
        f" noticed (for example {example})"
    )
    return [Paragraph(text)]


def _compared(diff: Diff, counts: Mapping[str, int]) -> Facts:
    """Return the footer: the two sides, the counts, and the aspects that were compared."""
    left, right = _SIDES[diff.asks]
    return facts(
        (left, Cell(diff.left, "key")),
        (right, Cell(diff.right, "key")),
        ("keys", summary(diff, counts)),
        *coverage(diff.compared, diff.scope),
    )


class _Lead(NamedTuple):
    """The lines after the answer: what kind of file it is, why it differs, the fix, and where the
    details are. `said` are the notes that these lines say.
    """

    blocks: list[Block]
    said: set[str]


def _lead(diff: Diff, unpaired: Iterable[Entry], likely: Sequence[Pair], lists_all: bool) -> _Lead:
    """Return the lead of a diff; if nothing differs it says only what kind of file it is.

    `unpaired` are the entries that count and that the `likely` renames do not explain.
    """
    blocks: list[Block] = []
    if diff.kinds:
        blocks.append(_kinds(diff))
    of_kind = notes_with(diff.notes, *_OF_KIND)
    blocks += noted(of_kind, quiet=True, names=diff.names)
    said = {*of_kind, *notes_with(diff.notes, *_SAID_BY_FIX)}
    if diff.identical:
        if diff.fix:
            blocks.append(Commands(_label_of_fix(diff), diff.fix))
        for label, note in _not_fixed(diff) if diff.unfixed else ():
            blocks.append(_line(label, with_names(note, diff.names)))
            said.add(note)
        return _Lead(blocks, said)
    reason = _reason(diff, unpaired, likely)
    if reason.text:
        blocks.append(_line("reason", reason.text))
        said.add(reason.note)
        said.update(notes_with(diff.notes, reason.code))
    if diff.fix:
        blocks.append(Commands(_label_of_fix(diff), diff.fix))
        for note in notes_with(diff.notes, "old-code"):
            blocks.append(_line("where", note))
    if _only_values(diff):
        said.update(notes_with(diff.notes, "value"))
    else:
        for label, note in _not_fixed(diff):
            if note != reason.note:
                blocks.append(_line(label, with_names(note, diff.names)))
                said.add(note)
    if reason.code:
        explain = f"`ckpttool explain {reason.code}` says more about the reason"
        if not reason.note and not lists_all:
            explain = f"--all lists every key; {explain}"
        blocks.append(_line("details", explain))
    return _Lead(blocks, said)


def _label_of_fix(diff: Diff) -> str:
    if any(fix.complete for fix in diff.fix):
        return "fix"
    return "partial fix" if diff.fix[-1].tried else "fix (not tried)"


def _line(label: str, text: str) -> Facts:
    return Facts(((label, text),), is_short=True)


class _Reason(NamedTuple):
    """Why the two differ, and the code to look up; `note` is the note that says it. No text: the
    answer says it.
    """

    text: str = ""
    code: str = ""
    note: str = ""


def _reason(diff: Diff, unpaired: Iterable[Entry], likely: Sequence[Pair]) -> _Reason:
    """Return the cause that explains most keys; a note if no key differs."""
    if diff.asks == "optimizer":
        for note in notes_with(diff.notes, "optimizer-class"):
            return _Reason(note, "optimizer-class", note)
    counts = Counter[str]()
    largest: dict[str, list[Entry]] = {}  # the largest group of each code
    for group in _by_cause(entry for entry in unpaired if entry.ignored is None):
        status, cause = group[0].status, group[0].cause
        if status == "same":
            continue
        code = cause.code.code if cause else status
        counts[code] += len(group)
        if len(group) > len(largest.get(code, ())):
            largest[code] = group
    explained = [code for code in counts if code not in _UNEXPLAINED]
    code = max(explained, key=counts.__getitem__, default="")
    if likely and len(likely) >= counts[code]:
        return _reason_of_renames(diff, likely)
    if code:
        group = largest[code]
        why = group[0].why(diff.names) or group[0].status
        return _Reason(f"{why} ({plural(len(group), 'key')})", code)
    if counts:
        return _Reason("", max(counts, key=counts.__getitem__))
    return _reason_in_notes(diff)


def _reason_in_notes(diff: Diff) -> _Reason:
    """Return the first warning that the other lines do not say."""
    for note in diff.notes:
        is_said = code_of(note) in (*_OF_KIND, *_SAID_BY_FIX, "no-fix")
        if not is_said and not isinstance(note, Info):
            return _Reason(with_names(note, diff.names), code_of(note), note)
    return _Reason()


def _reason_of_renames(diff: Diff, pairs: Sequence[Pair]) -> _Reason:
    """Return that a hook may be the reason, or the evidence if all likely renames have the same."""
    if not any(fix.tried for fix in diff.fix):
        for note in notes_with(diff.notes, "hidden-segment"):
            return _Reason(with_names(note, diff.names), "hidden-segment", note)
    evidence = {pair.evidence for pair in pairs}
    why = f"likely other names ({plural(len(pairs), 'pair')})"
    if len(evidence) == 1:
        why += f", inferred: {evidence.pop()}"
    return _Reason(why, "renamed")


def _only_values(diff: Diff) -> bool:
    """Return True if the names fit and values differ: there is nothing to fix."""
    return not diff.fix and [unfixed.code for unfixed in diff.unfixed] == ["value"]


def _not_fixed(diff: Diff) -> Iterator[tuple[str, str]]:
    """Yield what no command fixes, with a label, and what to do about it."""
    if not diff.fix:
        for note in notes_with(diff.notes, "several-parts"):
            yield "fix", note
            return
        for note in notes_with(diff.notes, "no-fix"):
            yield "no fix", note
    label = "not fixed" if diff.fix else "no fix"
    for unfixed in diff.unfixed:
        from ckpttool.fixes.unfixed import described

        advice = notes_with(diff.notes, unfixed.code)
        yield label, advice[0] if advice else described(unfixed)
    for note in notes_with(diff.notes, "other-names"):
        yield "rename", note


def _kinds(diff: Diff) -> Facts:
    """Return the sentences that say what the compared sections are, each once."""
    sentences = [kind.sentence(diff.left) for kind in diff.kinds.get("left", ())]
    sentences += [kind.sentence(diff.right) for kind in diff.kinds.get("right", ())]
    return kind_facts(dict.fromkeys(sentences))


def _uncounted(diff: Diff) -> frozenset[str]:
    """Return the statuses and codes, besides `same`, that answer, summary and table of causes do
    not count.
    """
    return (HARMLESS if diff.identical else diff.harmless) - {"same"}


def findings(diff: Diff) -> Iterator[Finding]:
    """Yield every entry in the order of the tensors on the right, then the entries that only left
    has.
    """
    left, right = diff.outlines
    left_places = positions(left)
    right_places = positions(right)

    def order(entry: Entry) -> float:
        if entry.right:
            return right_places.get(entry.right[0], inf)
        return left_places.get(entry.left[0], inf)

    for entry in sorted(diff.entries, key=order):
        hook = entry.hook
        is_difference = not diff.identical and diff.is_difference(entry)
        yield Finding(
            entry.status,
            tuple(outlined(key, left.get(key)) for key in entry.left),
            tuple(outlined(key, right.get(key)) for key in entry.right),
            entry.why(diff.names),
            entry.detail or "",
            entry.spread or (),
            (hook.file, hook.line) if hook is not None and hook.file else None,
            is_difference and entry.ignored is None,
        )


def _by_cause(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Group entries by status and cause with its hook. Ignored entries are apart: they must not
    hide what fails.
    """

    def kind(entry: Entry) -> tuple[object, ...]:
        hook = entry.hook
        place = None if hook is None else (hook.function, hook.file, hook.line)
        return entry.status, entry.cause, place, entry.ignored is None

    groups: dict[tuple[object, ...], list[Entry]] = {}
    # to hash a cause takes long, and most entries have the cause of the last
    for at, run in groupby(entries, kind):
        groups.setdefault(at, []).extend(run)
    return list(groups.values())


def _groups(entries: Iterable[Entry], diff: Diff, all: bool) -> tuple[KeyGroup, ...]:
    """Return a group for each cause, repeated layers on one line; with `all` each key has a line,
    equal ones too.
    """
    groups = []
    for group in _by_cause(entries):
        first = group[0]
        if first.status == "same" and not all:
            continue
        heading = f"{first.status}: {plural(len(group), 'key')}"
        why = first.why(diff.names)
        if why:
            heading += f", {why}"
        codes = first.cause.codes if first.cause else ()
        codes = tuple(code for code in codes if code != first.status)
        if codes:
            heading += f" [{', '.join(codes)}]"
        pairs = [(entry.left, entry.right, entry.detail or "") for entry in group]
        role = _ROLES.get(first.status, "bad")
        groups.append(_group(heading, pairs, all, "keys", role))
    return tuple(groups)


def _group(heading: str, pairs: Sequence[Pairing], all: bool, noun: str, role: Role) -> KeyGroup:
    """Return the names of both sides with the detail, a row for each pair or a few for repeated
    layers.
    """
    if not all:
        return key_group(heading, pairs, _ROWS, f"more {noun} (--all)", role)
    rows = []
    for left, right, detail in pairs:
        rows.append((" + ".join(left), " + ".join(right), detail))
    return KeyGroup(heading, tuple(rows), "", role, is_full=True)


def _accepted(diff: Diff, all: bool) -> Table:
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in diff.entries:
        if entry.ignored is not None:
            groups.setdefault((entry.status, entry.ignored), []).append(entry)
    rows: list[Row] = []
    for (status, reason), group in groups.items():
        keys: list[str] = []
        for entry in group:
            keys += entry.left or entry.right
        count = number(len(group))
        rows.append((Cell(status, "dim"), count, first_pattern(keys, all), reason))
    columns = (_STATUS, _ENTRIES, Column("key", "key"), Column("reason"))
    return Table("Accepted differences", columns, tuple(rows))
