"""The documents of `diff`: one line for each cause, and the suggested fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from math import inf, isfinite
from typing import NamedTuple

from ckpttool.core.text import Info, code_of, number, plural
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
    Paragraph,
    Role,
    Row,
    Table,
    filled,
    key_group,
    noted,
    shortened,
    with_names,
)
from ckpttool.report.documents.answer import LikelyRenames, answer, counted, summary
from ckpttool.report.documents.inspection import outlined

_ROWS = 8  # rows of a cause
_FEW = 2  # details of a change of a step
_SAID_BY_FIX = (
    "partial-fix",
    "untried",
    "old-code",
)  # codes of notes that the label of the fix says
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
    lists: dict[bool, list[str]] = {True: [], False: []}
    for aspect in ASPECTS:
        if aspect in compared:
            lists[bool(compared[aspect])].append(titles.get(aspect, aspect))
    pairs = (("compared", ", ".join(lists[True])), ("not compared", ", ".join(lists[False])))
    return tuple((label, text) for label, text in pairs if text)


def document(diff: Diff, *, all: bool = False) -> Document:
    """Return the document; with `all` every key has its own line."""
    uncounted = _uncounted(diff)
    entries: list[Entry] = []
    others: list[Entry] = []
    for group in alike(diff.entries):
        (others if group[0].is_one_of(uncounted) else entries).extend(group)
    renames = LikelyRenames.of(diff)
    counts = counted(entries, renames)
    unpaired = [entry for entry in entries if not renames.explain(entry)]
    lead = _lead(diff, unpaired, renames.pairs)
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
    blocks += [Paragraph(f"unused ignore entry: {line}", "warning") for line in diff.unused_ignores]
    blocks += _exchangeable(diff, entries)
    blocks.append(_compared(diff, counts))
    roles = {status: _ROLES.get(status, "bad") for status in diff.summary}
    quiet = frozenset({"same"} if len(roles) > 1 else ())
    listing = Listing((diff.left, diff.right), roles, partial(findings, diff), quiet)
    names = diff.names[:1] if diff.asks == "names" else diff.names
    title = " ".join(("diff", *names))
    return Document(title, answer(diff, counts), diff.passes, filled(blocks), listing, lead.blocks)


def _changes(diff: Diff, all: bool) -> Table:
    """Return how far values changed, the largest relative change first: a row for the tensors of
    all layers with one name, with the tensor that changed most; with `all` a row for each tensor.
    """
    by_name: dict[str, list[tuple[str, Change]]] = {}
    for entry in diff.entries:
        if entry.status == "value" and entry.change is not None and entry.right:
            key = entry.right[0]
            name = key if all else _NUMBER.sub("{}", key)
            by_name.setdefault(name, []).append((key, entry.change))
    most_changed = []
    for name, tensors in by_name.items():
        worst, change = max(tensors, key=lambda tensor: _extent(tensor[1]))
        most_changed.append((name, worst, change))
    most_changed.sort(key=lambda ranked: _extent(ranked[2]), reverse=True)
    extents = [_extent(change) for _, _, change in most_changed]
    largest = max(filter(isfinite, extents), default=0.0)
    rows = [_change_row(*ranked, largest) for ranked in most_changed]
    table = Table("Values, by relative change", _CHANGED, tuple(rows))
    return table if all else shortened(table, _ROWS, "--all")


def _extent(change: Change) -> float:
    """Return the relative change; what became NaN or infinite, or was 0, comes first."""
    new = change.nan_right + change.infinite_right - change.nan_left - change.infinite_left
    return inf if change.relative is None or new > 0 else change.relative


def _short(size: float | None) -> str:
    return "-" if size is None else f"{size:.2g}"


def _change_row(name: str, worst: str, change: Change, largest: float) -> Row:
    """Return the row of the tensors `name`; `largest` is the largest finite relative change."""
    not_finite = {
        "NaN": change.nan_left + change.nan_right,
        "infinite": change.infinite_left + change.infinite_right,
    }
    counts = ", ".join(f"{number(count)} {kind}" for kind, count in not_finite.items() if count)
    relative, norm = _short(change.relative), _short(change.norm)
    bar = min(_extent(change) / largest, 1) if largest else 1.0
    share = f"{change.differing / change.elements:.0%}"
    most = worst if worst != name else ""
    maximum = _short(change.maximum)
    return (name, Cell(relative, "number", bar), norm, maximum, share, counts, most)


def _likely_renames(diff: Diff, likely: Iterable[Pair], all: bool) -> Keys:
    """Return the pairs of likely renames, a group for each evidence."""
    by_evidence: dict[tuple[str, str], list[Pair]] = {}
    for pair in likely:
        by_evidence.setdefault((pair.evidence, pair.transposed), []).append(pair)
    groups = []
    for (evidence, transposed), pairs in by_evidence.items():
        heading = f"likely renames: {plural(len(pairs), 'pair')}, inferred: {evidence}"
        if transposed:
            side = diff.names[0] if transposed == "left" else diff.names[1]
            heading += f"; stored transposed in {side}"
        keys = [(pair.left, pair.right, "") for pair in pairs]
        groups.append(_group(heading, keys, all, "pairs", "warn"))
    return Keys("", tuple(groups))


def _ambiguous(diff: Diff, all: bool) -> Table:
    rows = []
    for match in () if diff.inferred is None else diff.inferred.ambiguous:
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
    if not groups or diff.identical:
        return []
    example = ", ".join(patterns(groups[0]))
    count = plural(sum(map(len, groups)), "tensor")
    same = "has" if count.startswith("1 ") else "have"
    text = (
        f"{count} {same} the same shape as a neighbor, so a swap would not be noticed"
        f" (for example {example})"
    )
    return [Paragraph(text)]


def _compared(diff: Diff, counts: Mapping[str, int]) -> Facts:
    """Return the footer: the two sides, the counts, and what was compared."""
    sides = zip(_SIDES[diff.asks], (diff.left, diff.right))
    pairs: list[tuple[str, Inline]] = [(label, Cell(side, "key")) for label, side in sides]
    keys = summary(diff, counts)
    pairs += [("keys", keys)] if keys else []
    return Facts((*pairs, *coverage(diff.compared, diff.scope)))


class _Lead(NamedTuple):
    """The lines after the answer: what kind of file it is, why it differs, the fix, and where the
    details are. `said` are the notes that these lines say.
    """

    blocks: tuple[Block, ...]
    said: frozenset[str]


def _lead(diff: Diff, unpaired: Iterable[Entry], likely: Sequence[Pair]) -> _Lead:
    """Return the lead of a diff; if nothing differs it says only what kind of file it is.

    `unpaired` are the entries that count, but for those that the `likely` renames explain.
    """
    kinds = [note for note in diff.notes if code_of(note) in _OF_KIND]
    blocks: list[Block] = [_kinds(diff)] if diff.kinds else []
    blocks += noted(kinds, quiet=True, names=diff.names)
    said = {note for note in diff.notes if code_of(note) in (*_OF_KIND, *_SAID_BY_FIX)}
    if diff.identical:
        blocks += [Commands("fix", diff.fix)] if diff.fix else []
        return _Lead(tuple(blocks), frozenset(said))
    reason = _reason(diff, unpaired, likely)
    if reason.text:
        blocks.append(_line("reason", reason.text))
        said.add(reason.note)
        said.update(note for note in diff.notes if code_of(note) == reason.code)
    if diff.fix:
        label = "partial fix" if diff.fix[-1].tried else "fix (not tried)"
        if any(fix.complete for fix in diff.fix):
            label = "fix"
        blocks.append(Commands(label, diff.fix))
        blocks += [_line("where", note) for note in diff.notes if code_of(note) == "old-code"]
    if _only_values(diff):
        said.update(note for note in diff.notes if code_of(note) == "value")
    else:
        for label, note in _not_fixed(diff):
            blocks.append(_line(label, with_names(note, diff.names)))
            said.add(note)
    if reason.code:
        more = "" if reason.note else "--all lists every key; "
        details = f"{more}`ckpttool explain {reason.code}` says more about the reason"
        blocks.append(_line("details", details))
    return _Lead(tuple(blocks), frozenset(said))


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
    for note in diff.notes if diff.asks == "optimizer" else ():
        if code_of(note) == "optimizer-class":
            return _Reason(note, code_of(note), note)
    failing = [entry for entry in unpaired if entry.ignored is None and entry.status != "same"]
    by_code: dict[str, list[list[Entry]]] = {}
    for group in _by_cause(failing):
        cause = group[0].cause
        by_code.setdefault(cause.code.code if cause else group[0].status, []).append(group)
    counts = {code: sum(map(len, groups)) for code, groups in by_code.items()}
    explained = {code: count for code, count in counts.items() if code not in _UNEXPLAINED}
    if likely and len(likely) >= max(explained.values(), default=0):
        return _reason_of_renames(diff, likely)
    if explained:
        code = max(explained, key=explained.__getitem__)
        largest = max(by_code[code], key=len)
        why = largest[0].why(diff.names) or largest[0].status
        return _Reason(f"{why} ({plural(len(largest), 'key')})", code)
    if counts:
        return _Reason("", max(counts, key=counts.__getitem__))
    for note in diff.notes:
        if not isinstance(note, Info) and code_of(note) not in (*_OF_KIND, *_SAID_BY_FIX, "no-fix"):
            return _Reason(with_names(note, diff.names), code_of(note), note)
    return _Reason()


def _reason_of_renames(diff: Diff, pairs: Sequence[Pair]) -> _Reason:
    """Return that a hook may be the reason, or the evidence if all likely renames have the same."""
    hidden = [note for note in diff.notes if code_of(note) == "hidden-segment"]
    if hidden and not any(fix.tried for fix in diff.fix):
        return _Reason(with_names(hidden[0], diff.names), "hidden-segment", hidden[0])
    evidence = {pair.evidence for pair in pairs}
    why = evidence.pop() if len(evidence) == 1 else "likely other names"
    return _Reason(f"{why} ({plural(len(pairs), 'pair')})", "renamed")


def _only_values(diff: Diff) -> bool:
    """Return True if the names fit and values differ: there is nothing to fix."""
    return not diff.fix and [unfixed.code for unfixed in diff.unfixed] == ["value"]


def _not_fixed(diff: Diff) -> Iterator[tuple[str, str]]:
    """Yield what no command fixes, with a label, and what to do about it."""
    several = next((note for note in diff.notes if code_of(note) == "several-parts"), None)
    if several is not None and not diff.fix:
        yield "fix", several
        return
    if not diff.fix:
        for note in diff.notes:
            if code_of(note) == "no-fix":
                yield "no fix", note
    for unfixed in diff.unfixed:
        from ckpttool.fixes.unfixed import described

        advice = next((note for note in diff.notes if code_of(note) == unfixed.code), None)
        yield "not fixed" if diff.fix else "no fix", advice or described(unfixed)
    for note in diff.notes:
        if code_of(note) == "other-names":
            yield "rename", note


def _kinds(diff: Diff) -> Facts:
    """Return the sentences that say what the compared sections are, each once."""
    sentences: dict[str, None] = {}
    for side, source in (("left", diff.left), ("right", diff.right)):
        for kind in diff.kinds.get(side, ()):
            sentences[kind.sentence(source)] = None
    return Facts(tuple(("kind", text) for text in sentences), is_short=True)


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
    left_places = {key: place for place, key in enumerate(left)}
    right_places = {key: place for place, key in enumerate(right)}

    def order(entry: Entry) -> float:
        if entry.right:
            return right_places.get(entry.right[0], inf)
        return left_places.get(entry.left[0], inf)

    for entry in sorted(diff.entries, key=order):
        has_place = entry.hook is not None and entry.hook.file
        yield Finding(
            entry.status,
            tuple(outlined(key, left.get(key)) for key in entry.left),
            tuple(outlined(key, right.get(key)) for key in entry.right),
            entry.why(diff.names),
            entry.detail or "",
            entry.spread or (),
            (entry.hook.file, entry.hook.line) if entry.hook is not None and has_place else None,
            not diff.identical and diff.is_difference(entry) and entry.ignored is None,
        )


def _by_cause(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Group entries by status and cause with its hook. Ignored entries are apart: they must not
    hide what fails.
    """

    def kind(entry: Entry) -> tuple[object, ...]:
        hook = entry.hook and (entry.hook.function, entry.hook.file, entry.hook.line)
        return entry.status, entry.cause, hook, entry.ignored is None

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
    for group in _by_cause(entry for entry in entries if all or entry.status != "same"):
        first = group[0]
        heading = f"{first.status}: {plural(len(group), 'key')}"
        why = first.why(diff.names)
        if why:
            heading += f", {why}"
        codes = first.cause.codes if first.cause else ()
        codes = tuple(code for code in codes if code != first.status)
        if codes:
            heading += f" [{', '.join(codes)}]"
        pairs = [(entry.left, entry.right, entry.detail or "") for entry in group]
        groups.append(_group(heading, pairs, all, "keys", _ROLES.get(first.status, "bad")))
    return tuple(groups)


def _group(
    heading: str,
    pairs: Sequence[tuple[tuple[str, ...], tuple[str, ...], str]],
    all: bool,
    noun: str,
    role: Role = "plain",
) -> KeyGroup:
    """Return the names of both sides with the detail, a row for each pair or a few for repeated
    layers.
    """
    if all:
        rows = tuple((" + ".join(left), " + ".join(right), detail) for left, right, detail in pairs)
        return KeyGroup(heading, rows, "", role, is_full=True)
    return key_group(heading, pairs, _ROWS, f"more {noun} (--all)", role)


def _accepted(diff: Diff, all: bool) -> Table:
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in diff.entries:
        if entry.ignored is not None:
            groups.setdefault((entry.status, entry.ignored), []).append(entry)
    rows: list[Row] = []
    for (status, reason), group in groups.items():
        keys = chain(*(entry.left or entry.right for entry in group))
        count = number(len(group))
        rows.append((Cell(status, "dim"), count, first_pattern(keys, all), reason))
    columns = (_STATUS, _ENTRIES, Column("key", "key"), Column("reason"))
    return Table("Accepted differences", columns, tuple(rows))
