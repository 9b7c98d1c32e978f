"""Accept differences: those not in `--fail-on`, and those ignored with a reason."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.limits import limits
from ckpttool.core.values import dataclass
from ckpttool.diffing.options import DiffOptions, statuses_in
from ckpttool.diffing.result import Diff, Entry
from ckpttool.io.files import opened
from ckpttool.ruleset.patterns import matches

# torch refuses it even with ``strict=False``, so `--fail-on` cannot leave it out
_REFUSED = frozenset({"shape"})
_SYNTAX = "for example 'missing,shape head.* # the head is trained from scratch'"


@dataclass(frozen=True, slots=True)
class Ignore:
    """One line: the statuses and keys (`pattern`, as in ``--drop``) that it accepts, and why.
    `place` is its origin.
    """

    text: str
    statuses: frozenset[str]
    pattern: str
    reason: str
    place: str

    def covers(self, entry: Entry, statuses: frozenset[str]) -> bool:
        """Return True if it accepts one of these statuses of the entry: all keys of one of its
        sides match.
        """
        if self.statuses.isdisjoint(statuses):
            return False
        for side in (entry.left, entry.right):
            if side and all(matches(self.pattern, key) for key in side):
                return True
        return False


def judged(diff: Diff, options: DiffOptions) -> Diff:
    """Return the diff with what is ignored, and whether the rest is accepted. Raises `CkptError`
    for invalid lines.

    A difference that no entry shows is never accepted.
    """
    if not options.says_what_fails:
        return diff
    ignores = _ignores(options)
    used = set[Ignore]()
    entries, remaining = [], set[str]()
    for entry in diff.entries:
        if diff.is_difference(entry):
            statuses = entry.statuses - diff.harmless
            covering = [ignore for ignore in ignores if ignore.covers(entry, statuses)]
            used.update(covering)
            left_over = statuses.difference(*(ignore.statuses for ignore in covering))
            remaining |= left_over
            if not left_over:
                reasons = dict.fromkeys(ignore.reason for ignore in covering)
                entry = replace(entry, ignored="; ".join(reasons))
        entries.append(entry)
    failing: Collection[str] = remaining
    if options.fail_on is not None:
        failing = statuses_in(options.fail_on) | _REFUSED
    fails = bool(diff.other_failure) or not remaining.isdisjoint(failing)
    ok = diff.identical or not fails
    unused = tuple(f"{ignore.text} ({ignore.place})" for ignore in ignores if ignore not in used)
    unused_fail = bool(unused) and options.fail_on_unused
    return replace(
        diff,
        entries=tuple(entries),
        accepted=ok and not unused_fail,
        unused_ignores=unused,
        failing_ignores=len(unused) if unused_fail and ok else 0,
    )


def _ignores(options: DiffOptions) -> tuple[Ignore, ...]:
    """Return the ignore entries of the options and the file. Raises `CkptError` with every invalid
    line.
    """
    lines = [("--ignore", text) for text in options.ignore or ()]
    for path in options.ignore_file or ():
        lines += _lines(path)
    ignores, problems = [], []
    for place, line in lines:
        text = line.strip()
        try:
            ignores.append(_ignore(text, place))
        except CkptError as error:
            problems.append(Problem(error.message, f"{place}: {text:.100}"))
    if problems:
        raise CkptError("invalid ignore lines", hint=_SYNTAX, problems=problems)
    return tuple(ignores)


def _ignore(text: str, place: str) -> Ignore:
    """Read one line. Raises `CkptError` if it is invalid."""
    words, _, reason = text.partition(" # ")
    statuses, _, pattern = words.strip().partition(" ")
    pattern, reason = pattern.strip(), reason.strip()
    if not pattern:
        raise CkptError("not of the form STATUS PATTERN # REASON", hint=_SYNTAX)
    if not reason:
        raise CkptError("has no reason", hint=_SYNTAX)
    matches(pattern, "")  # raises if it is not a pattern
    return Ignore(text, statuses_in(statuses), pattern, reason, place)


def _lines(path: str) -> list[tuple[str, str]]:
    """Return the lines of the file with their places, without comments and empty lines."""
    with opened(path) as file:
        content = file.read(limits().rules_bytes + 1)
    if len(content) > limits().rules_bytes:
        limit = limits().named("rules_bytes")
        raise CkptError(f"{path} is too large for an ignore file: {limit}", hint=_SYNTAX)
    lines = []
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#"):
            lines.append((f"{path}:{number}", line))
    return lines
