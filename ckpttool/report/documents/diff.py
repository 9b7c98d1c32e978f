"""The documents of `diff`: one line for each cause, and the suggested fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import inf

from ckpttool.core.text import Info, code_of, number, plural
from ckpttool.diffing.result import (
    ASPECTS,
    HARMLESS,
    NO_VALUES,
    STATUSES,
    Compared,
    Diff,
    Entry,
    count_of,
)
from ckpttool.naming.evidence import Pair
from ckpttool.report.collapse import collapse, first_pattern
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
    Note,
    Role,
    Row,
    Table,
    filled,
    key_group,
    noted,
)
from ckpttool.report.documents.inspection import outlined

_ROWS = 8  # rows of a cause
_FEW = 2  # details of a change of a step
_SAID_BY_FIX = ("partial-fix", "untried")  # codes of notes that the label of the fix says
_ROLES: dict[str, Role] = {
    "same": "ok",
    "alias": "dim",
    "not_serialized": "dim",
    "extra_state": "dim",
    "renamed": "warn",
}
_LEFT, _RIGHT, _WHY = Column("left", "key"), Column("right", "key"), Column("why")
_STATUS, _ENTRIES = Column("status"), Column("entries", "number")


def coverage(compared: Compared, scope: str) -> tuple[tuple[str, Inline], ...]:
    """Return the compared aspects and the others, as two facts."""
    titles = {aspect: aspect for aspect in ASPECTS if aspect in compared}
    long = {
        "other_sections": "other sections",
        "objects": "non-tensor entries",
        "code": "the code of the program",
    }
    if scope and scope != NO_VALUES:
        long["values"] = f"values ({scope})"
    titles = {aspect: long.get(aspect, aspect) for aspect in titles}
    pairs = (
        (label, ", ".join(title for aspect, title in titles.items() if compared[aspect] is covered))
        for label, covered in (("compared", True), ("not compared", False))
    )
    return tuple(pair for pair in pairs if pair[1])


def _in_section(diff: Diff, verdict: str) -> str:
    """Return the verdict with the section that it is about, if that is not the complete file."""
    return f"{verdict} in {diff.section}" if diff.section else verdict


def _with_values(verdict: str, compared: Compared, scope: str, identical: bool) -> str:
    """Return the verdict with what it says about values."""
    if not compared.get("values", True):
        return f"{verdict}; values not compared ({scope})"
    if not identical or "values" not in compared:
        return verdict
    return f"{verdict}; values are equal" + (f" {scope}" if scope else "")


def document(diff: Diff, *, all: bool = False) -> Document:
    """Return the document; with `all` every key has its own line."""
    uncounted = _uncounted(diff)
    counted = [entry for entry in diff.entries if not entry.is_one_of(uncounted)]
    others = [entry for entry in diff.entries if entry.is_one_of(uncounted)]
    counts = count_of(STATUSES, Counter(entry.status for entry in counted))
    notes = [note for note in diff.notes if code_of(note) not in _SAID_BY_FIX]
    lead, reason = _lead(diff, notes)
    blocks: list[Block] = [
        Keys("Every key" if all else "", _groups(counted, all), is_listed=all),
        Keys("Not counted as differences", _groups(others, all)),
    ]
    if diff.inferred is not None and diff.inferred.pairs:
        by_evidence: dict[tuple[str, str], list[Pair]] = {}
        for pair in diff.inferred.pairs:
            by_evidence.setdefault((pair.evidence, pair.transposed), []).append(pair)
        likely = []
        for (evidence, transposed), pairs in by_evidence.items():
            heading = f"{plural(len(pairs), 'pair')}, {evidence}"
            heading += f"; stored transposed in {transposed}" if transposed else ""
            likely.append(
                _group(heading, [(pair.left, pair.right, "") for pair in pairs], all, "pairs")
            )
        blocks.append(Keys("Likely renames (heuristic; does not affect the result)", tuple(likely)))
    if diff.inferred is not None:
        ambiguous = tuple(
            (first_pattern(one.left, all), first_pattern(one.right, all), one.reason)
            for one in diff.inferred.ambiguous
        )
        blocks.append(Table("Ambiguous matches", (_LEFT, _RIGHT, _WHY), ambiguous))
    blocks += noted((note for note in notes if note is not reason), quiet=diff.identical)
    blocks.append(_accepted(diff, all))
    blocks += [Note(f"unused ignore entry: {line}", "warning") for line in diff.unused_ignores]
    # A key without a counterpart, or under another name, could be any of those with its shape.
    unsure = {key for e in counted if e.left != e.right for key in e.right}
    exchangeable = [group for group in diff.exchangeable if not unsure.isdisjoint(group)]
    if exchangeable and not diff.identical:
        example = ", ".join(
            group.pattern for group in collapse((key, None) for key in exchangeable[0])
        )
        count = plural(sum(map(len, exchangeable)), "tensor")
        same = "has" if count.startswith("1 ") else "have"
        blocks.append(
            Note(
                f"{count} {same} the same shape as a neighbor, so a swap would not be noticed"
                f" (for example {example})"
            )
        )
    sides = (("left", Cell(diff.left, "key")), ("right", Cell(diff.right, "key")))
    summary = ", ".join(f"{number(count)} {status}" for status, count in counts.items())
    blocks.append(
        Facts(
            (
                *sides,
                *((("keys", summary),) if summary else ()),
                *coverage(diff.compared, diff.scope),
            )
        )
    )
    verdict = _in_section(diff, _verdict(diff))
    verdict = _with_values(verdict, diff.compared, diff.scope, diff.identical)
    roles = {status: _ROLES.get(status, "bad") for status in diff.summary}
    quiet = frozenset({"same"} if len(roles) > 1 else ())
    listing = Listing((diff.left, diff.right), roles, partial(findings, diff), quiet)
    if diff.kinds:
        lead = (_kinds(diff), *lead)
    return Document("diff", verdict, diff.passes, filled(blocks), listing, lead)


def _lead(diff: Diff, notes: Sequence[str]) -> tuple[tuple[Block, ...], str | None]:
    """Return the most important reason, the fix and where the details are; and the note that is the
    reason, if any.
    """
    if diff.identical:
        return ((Commands("fix", diff.fix),) if diff.fix else ()), None
    harmless = _uncounted(diff) | {"same"}
    failing = [
        entry for entry in diff.entries if not entry.is_one_of(harmless) and entry.ignored is None
    ]
    pairs: list[tuple[str, Inline]] = []
    details, reason = "", None
    if failing:
        largest = max(_by_cause(failing), key=len)
        code = largest[0].cause.code.code if largest[0].cause else largest[0].status
        text = f"{largest[0].why() or largest[0].status} ({plural(len(largest), 'key')})"
        if (
            diff.inferred is not None
            and diff.inferred.pairs
            and largest[0].status in ("missing", "unexpected")
        ):
            text = f"likely other names ({plural(len(diff.inferred.pairs), 'pair')})"
        pairs.append(("reason", text))
        details = f"--all lists every key; `ckpttool explain {code}` says more about the reason"
    else:
        reason = next((note for note in notes if not isinstance(note, Info)), None)
        pairs += [("reason", reason)] if reason is not None else []
        if code := code_of(reason or ""):
            details = f"`ckpttool explain {code}` says more about the reason"
    lead: list[Block] = [Facts(tuple(pairs), is_short=True)] if pairs else []
    if diff.fix:
        complete = diff.fix[-1].complete or any(fix.complete for fix in diff.fix)
        label = "fix" if complete else "partial fix" if diff.fix[-1].tried else "fix (not tried)"
        lead.append(Commands(label, diff.fix))
    elif several := next((note for note in diff.notes if code_of(note) == "several-parts"), None):
        lead.append(Facts((("fix", several),), is_short=True))
    elif diff.unfixed:
        keys = sum(len(one.keys) for one in diff.unfixed)
        codes = ", ".join(one.code for one in diff.unfixed)
        lead.append(
            Facts((("fix", f"no command fixes {plural(keys, 'key')} ({codes})"),), is_short=True)
        )
    if details:
        lead.append(Facts((("details", details),), is_short=True))
    return tuple(lead), reason


def _kinds(diff: Diff) -> Facts:
    """Return the sentences that say what the compared sections are, each once."""
    sentences: dict[str, None] = {}
    for side, source in (("left", diff.left), ("right", diff.right)):
        for kind in diff.kinds.get(side, ()):
            sentences[kind.sentence(source)] = None
    return Facts(tuple(("kind", text) for text in sentences), is_short=True)


def _uncounted(diff: Diff) -> frozenset[str]:
    """Return the statuses and codes, besides `same`, that verdict, summary and table of causes do
    not count.
    """
    return (HARMLESS if diff.identical else diff.harmless) - {"same"}


def _verdict(diff: Diff) -> str:
    if diff.failing_ignores:
        unused = plural(diff.failing_ignores, "unused ignore entry")
        return (
            f"{unused} (--fail-on-unused);"
            f" {_verdict(replace(diff, accepted=True, failing_ignores=0))}"
        )
    if diff.identical:
        harmless = sum(entry.status not in HARMLESS for entry in diff.entries)
        if harmless and diff.compared.get("values"):
            return (
                f"the same weights; {plural(harmless, 'key')} under another name, or computed"
                " by a hook"
            )
        if harmless:
            return f"loads; {plural(harmless, 'harmless difference')}"
        return "no differences between the models" if diff.has_other_notes else "no differences"
    differing = [entry for entry in diff.entries if diff.is_difference(entry)]
    ignored = sum(entry.ignored is not None for entry in differing)
    uncounted = _uncounted(diff)
    total = sum(not entry.is_one_of(uncounted) for entry in diff.entries)
    count = (
        f"{number(len(differing))} of {plural(total, 'key')}"
        f" {'differs' if len(differing) == 1 else 'differ'}"
    )
    if diff.accepted:
        others = len(differing) - ignored
        parts = [f"{number(ignored)} ignored"] * bool(ignored) + [
            f"{number(others)} not in --fail-on"
        ] * bool(others)
        return f"{count}, accepted ({', '.join(parts)})"
    if not differing:
        return diff.other_failure or "different"
    verdict = count + (f", {number(ignored)} of them ignored" if ignored else "")
    pairs = 0 if diff.inferred is None else len(diff.inferred.pairs)
    return f"{verdict} ({plural(pairs, 'likely rename')})" if pairs else verdict


def findings(diff: Diff) -> Iterator[Finding]:
    """Yield every entry in the order of the tensors on the right, then the entries that only left
    has.
    """
    left, right = diff.outlines
    places = [{key: place for place, key in enumerate(side)} for side in (left, right)]

    def order(entry: Entry) -> float:
        keys, side = (entry.right, places[1]) if entry.right else (entry.left, places[0])
        return side.get(keys[0], inf)

    for entry in sorted(diff.entries, key=order):
        mine = tuple(outlined(key, left.get(key)) for key in entry.left)
        theirs = tuple(outlined(key, right.get(key)) for key in entry.right)
        place = (
            None
            if entry.hook is None or not entry.hook.file
            else (entry.hook.file, entry.hook.line)
        )
        fails = not diff.identical and diff.is_difference(entry) and entry.ignored is None
        why, detail = entry.why(), entry.detail or ""
        yield Finding(entry.status, mine, theirs, why, detail, entry.spread or (), place, fails)


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


def _groups(entries: Iterable[Entry], all: bool) -> tuple[KeyGroup, ...]:
    """Return a group for each cause, repeated layers on one line; with `all` each key has a line,
    equal ones too.
    """
    groups = []
    for group in _by_cause(entry for entry in entries if all or entry.status != "same"):
        first = group[0]
        codes = [
            code for code in (first.cause.codes if first.cause else ()) if code != first.status
        ]
        heading = f"{first.status}: {plural(len(group), 'key')}"
        heading += "".join(f", {text}" for text in [first.why()] if text)
        heading += f" [{', '.join(codes)}]" if codes else ""
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
        keys = first_pattern((key for e in group for key in e.left or e.right), all)
        rows.append((Cell(status, "dim"), number(len(group)), keys, reason))
    return Table(
        "Accepted differences",
        (_STATUS, _ENTRIES, Column("key", "key"), Column("reason")),
        tuple(rows),
    )
