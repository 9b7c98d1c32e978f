"""Which differences a pipeline accepts: those that `--fail-on` does not name, and those ignored with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.limits import limits
from ckpttool.core.values import dataclass
from ckpttool.diffing.options import DiffOptions, statuses_in
from ckpttool.diffing.result import Diff, Entry
from ckpttool.io.files import opened
from ckpttool.rules.patterns import matches

_SYNTAX = "as in 'missing,shape head.* # the head is trained anew'"


@dataclass(frozen=True, slots=True)
class Ignore:
    """One line: the keys (`pattern`, as of ``--drop``) and statuses that it speaks of, why, and where it stands."""

    text: str
    statuses: frozenset[str]
    pattern: str
    reason: str
    place: str

    def covers(self, entry: Entry) -> bool:
        """Whether it speaks of the entry: all keys of one of its sides."""
        if entry.status not in self.statuses:
            return False
        return any(side and all(matches(self.pattern, key) for key in side) for side in (entry.left, entry.right))


def judged(diff: Diff, options: DiffOptions) -> Diff:
    """The diff with what is ignored, and whether the rest is accepted. Raises `CkptError` for lines that say neither.

    What stands against it and shows in no entry is never accepted.
    """
    if not options.says_what_fails:
        return diff
    ignores = _ignores(options)
    used = set[Ignore]()
    entries = tuple(_judged(entry, ignores, used, diff) for entry in diff.entries)
    failing = None if options.fail_on is None else statuses_in(options.fail_on)
    open_ = [entry for entry in entries if diff.weighs(entry) and entry.ignored is None]
    fails = bool(diff.beyond) or any(failing is None or entry.status in failing for entry in open_)
    idle = tuple(f"{one.text} ({one.place})" for one in ignores if one not in used)
    accepted = (diff.identical or not fails) and not (idle and options.fail_on_unused)
    unused = len(idle) if options.fail_on_unused and (diff.identical or not fails) else 0
    return replace(diff, entries=entries, accepted=accepted, unused_ignores=idle, failing_ignores=unused)


def _judged(entry: Entry, ignores: tuple[Ignore, ...], used: set[Ignore], diff: Diff) -> Entry:
    found = [one for one in ignores if diff.weighs(entry) and one.covers(entry)]
    used.update(found)
    return replace(entry, ignored=found[0].reason) if found else entry


def _ignores(options: DiffOptions) -> tuple[Ignore, ...]:
    """What the options and the file ignore. Raises `CkptError` with every line that is none."""
    lines = [("--ignore", text) for text in options.ignore or ()]
    lines += list(_lines(options.ignore_file)) if options.ignore_file is not None else []
    found, problems = [], []
    for place, text in lines:
        try:
            found.append(_parsed(text, place))
        except CkptError as error:
            problems.append(Problem(error.message, f"{place}: {text.strip():.100}"))
    if problems:
        raise CkptError("what is to be ignored, and why, is not said", hint=_SYNTAX, problems=problems)
    return tuple(found)


def _lines(path: str) -> Iterator[tuple[str, str]]:
    """The lines of the file that say something, each with its place."""
    with opened(path) as file:
        content = file.read(limits().rules_bytes + 1)
    if len(content) > limits().rules_bytes:
        raise CkptError(f"{path} is too large for a list: {limits().named('rules_bytes')}", hint=_SYNTAX)
    for count, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield f"{path}:{count}", line


def _parsed(text: str, place: str) -> Ignore:
    said, _, reason = text.strip().partition(" # ")
    words = said.split(maxsplit=1)
    if len(words) < 2 or not reason.strip():
        raise CkptError("has no reason" if len(words) == 2 else "is no STATUS PATTERN # REASON", hint=_SYNTAX)
    pattern = words[1].strip()
    matches(pattern, "")  # raises where it is no pattern
    return Ignore(text.strip(), statuses_in(words[0]), pattern, reason.strip(), place)
