"""The results of `diff`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ckpttool.core.checkpoint import Kind, Section, once_per_section
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.names import HOOK, Hook, Names
from ckpttool.core.schema import (
    COUNT,
    FLAG,
    LEFT_OUT,
    TEXT,
    TEXTS,
    Members,
    list_of,
    notes_as,
    nullable,
    object_of,
    one_of,
    plain,
    record,
    row,
    unless_empty,
)
from ckpttool.core.strides import Shape
from ckpttool.core.tables import by_key
from ckpttool.core.values import dataclass, public
from ckpttool.diffing.causes import NAMES, SIDES, Cause, Code, Sides
from ckpttool.evaluate.compare import Change
from ckpttool.kinds.table import KIND_MEMBERS
from ckpttool.naming.evidence import Ambiguous, Inference, Pair

if TYPE_CHECKING:
    from typing_extensions import Self

STATUSES = (
    *("same", "renamed", "transformed", "order", "alias", "shape", "dtype", "value"),
    *("missing", "unexpected", "not_serialized", "extra_state"),
)
HARMLESS = frozenset({"same", "alias", "not_serialized", "extra_state"})
# Statuses that are harmless for two checkpoints that replace each other: a strict load fails
# without a second name.
EITHER_WAY = HARMLESS - {"alias"}

# What a diff can compare, in the order of reports. `objects` are entries that are not tensors
# (``epoch``, ``args``, extra state), `code` is the code of a program.
ASPECTS = (
    *("keys", "shapes", "dtypes", "values", "aliases", "metadata"),
    *("optimizers", "other_sections", "objects", "code"),
)
Compared = Mapping[str, bool]

# What a diff asks: does a model load a checkpoint (`load`), under which names does a model save its
# tensors (`names`), what has changed since a names file (`drift`), how do two checkpoints differ
# (`pair`), does an optimizer load a saved state (`optimizer`), or does PEFT load an adapter onto a
# model (`adapter`)?
Asks = Literal["load", "names", "drift", "pair", "optimizer", "adapter"]
NO_VALUES = "use `diff LEFT RIGHT --values`"


def count_of(names: Iterable[str], counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts that are not 0, in the order of `names`."""
    return {name: counts[name] for name in names if counts.get(name)}


class Outline(Protocol):
    """The dtype and shape of a tensor; the shape is None if it depends on values."""

    @property
    def dtype(self) -> str:
        """Torch's name without ``torch.``."""

    @property
    def shape(self) -> Shape | None:
        """Its sizes."""


Outlines = Mapping[str, Outline]


def kinds_by_side(**kinds: tuple[Kind, ...]) -> dict[str, tuple[Kind, ...]]:
    """Return the kinds of each side, without sides that are state dicts and no more."""
    return {side: side_kinds for side, side_kinds in kinds.items() if side_kinds}


@once_per_section
def outlines(section: Section) -> Outlines:
    """Return the tensors of a section by key."""
    return by_key(section.tensors)


def names_outlines(names: Names) -> tuple[Outlines, Outlines]:
    """Return the tensors that a model saves, by key, and its runtime tensors, by FQN."""
    saved = by_key(names.serialized)
    return saved, {tensor.fqn: tensor for tensor in names.runtime}


@dataclass(frozen=True, slots=True)
class Entry:
    """One finding. Entries with the same cause are one line of a report.

    Attributes:
        status: One of `STATUSES`.
        left: The keys of the left; empty if only the right has the key.
        right: The keys of the right; empty if only the left has the key.
        cause: Why it differs; None if that is not known.
        hook: The state_dict hook that is responsible.
        detail: Text about this entry only.
        spread: How far the values differ, if that was measured: pairs of ``(exponent of 2,
            elements)``.
        ignored: The reason of the ignore entry that accepts it.
        change: Norms and counts of the change of values, if they were measured.
    """

    status: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    cause: Cause | None = None
    hook: Hook | None = None
    detail: str | None = None
    spread: tuple[tuple[int, int], ...] | None = None
    ignored: str | None = None
    change: Change | None = None

    @property
    def reason(self) -> str:
        """The cause in words; empty if there is none."""
        return "" if self.cause is None else self.cause.text()

    def why(self, sides: Sides = SIDES) -> str:
        """Return the cause in words, with the hook that is responsible."""
        reason = "" if self.cause is None else self.cause.text(sides)
        if self.hook is None:
            return reason
        return f"{reason}: {self.hook.function} ({self.hook.file}:{self.hook.line})"

    def problem(self, key: str, sides: Sides = SIDES) -> Problem:
        """Return it as a problem of an error; its kind is the status."""
        text = ": ".join(filter(None, (self.why(sides), self.detail)))
        return Problem(text or self.status, key, self.status)

    @property
    def statuses(self) -> frozenset[str]:
        """Its status, and what else differs: the dtype, the name."""
        statuses = {self.status}
        if self.status in ("shape", "dtype", "value"):
            if self.has(Code.DTYPE):
                statuses.add("dtype")
            if self.has(*NAMES):
                statuses.add("renamed")
        return frozenset(statuses)

    def is_one_of(self, kinds: frozenset[str]) -> bool:
        """Return True if all its statuses, or its code, are among these; a status is not taken for
        a code.
        """
        if self.cause is None:
            return self.status in kinds
        code = self.cause.code.code
        if code in kinds and code not in STATUSES:
            return True
        return self.status in kinds and self.statuses <= kinds

    def has(self, *codes: Code) -> bool:
        """Return True if one of the codes is among its causes."""
        return self.cause is not None and self.cause.has(*codes)


def alike(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield groups of entries with the same status and cause, as they follow each other."""
    for _, group in groupby(entries, attrgetter("status", "cause")):
        yield list(group)


_UNEXPECTED, _MISSING = Cause(Code.UNEXPECTED), Cause(Code.MISSING)


def only_left(
    key: str, cause: Cause = _UNEXPECTED, hook: Hook | None = None, detail: str | None = None
) -> Entry:
    """Return the finding that the right does not have the left's key."""
    return Entry("unexpected", (key,), (), cause, hook, detail)


def only_right(
    key: str, cause: Cause = _MISSING, hook: Hook | None = None, detail: str | None = None
) -> Entry:
    """Return the finding that the left does not have the right's key."""
    return Entry("missing", (), (key,), cause, hook, detail)


@dataclass(frozen=True, slots=True)
class Remedy:
    """How the state of a saved optimizer could be fixed.

    `way`: order its parameters by name (``by_name``); put them into the groups of the optimizer
    that loads it (``regroup``), and add the state that it creates (``create_state``); name the
    model (``old_model``) or the optimizer (``old_optimizer``) that saved it; leave the state out
    (``drop_state``). For two saved optimizers: bring the left
    into the right's order and groups (``like_right``), or only into its form of keys (``keys``;
    ``keys_by_model`` if that needs a model). `form` is the form of the keys, None if it stays.

    For ``old_model``, `same_groups` says whether the same optimizer can have saved the file and
    load it (None: its ids are in the model's order), and `foreign_keys` are tensors that the new
    model does not have.
    """

    way: Literal[
        "by_name",
        "regroup",
        "create_state",
        "old_model",
        "old_optimizer",
        "drop_state",
        "like_right",
        "keys",
        "keys_by_model",
    ]
    form: str | None = None
    same_groups: bool | None = None
    foreign_keys: tuple[str, ...] = ()


class Fix(str):
    """A command that can be pasted.

    Attributes:
        complete: True if nothing differs after it, or after the last of two commands.
        tried: True if it was tried on the index; it has no placeholder.
        options: The options of the remap that it is, if that was tried, is complete and guesses
            nothing.
        source: The operand of that remap, if it is a section of left.
    """

    complete: bool
    tried: bool
    options: Any
    source: str

    def __new__(
        cls,
        command: str,
        *,
        complete: bool = False,
        tried: bool = False,
        options: Any = None,
        source: str = "",
    ) -> Self:
        """Return the command."""
        fix = super().__new__(cls, command)
        fix.complete, fix.tried, fix.options, fix.source = complete, tried, options, source
        return fix


@dataclass(frozen=True, slots=True)
class Unfixed:
    """Keys that no suggested command fixes.

    Attributes:
        code: The code that says why.
        keys: The keys.
    """

    code: str
    keys: tuple[str, ...]


def statuses_of(entries: Iterable[Entry]) -> set[str]:
    """Return the statuses of the entries, each once."""
    return {entry.status for entry in entries}


@public
@dataclass(frozen=True, slots=True)
class Diff:
    """The answer of `diff`.

    Attributes:
        left: The left operand, as reports call it.
        right: The right operand, as reports call it.
        identical: True if no entry differs, but for `harmless` ones, and nothing else failed.
        entries: The findings, one for each key or pair of keys.
        fix: Commands that can be pasted.
        notes: Sentences that are not about a single key.
        inferred: Likely renames; `identical` does not depend on them. None if they were not
            searched, or, for a model, if no suggested command uses them.
        rules: The text of a rules file for the likely renames.
        exchangeable: Keys of one shape in the same layers, a tuple for each shape.
        harmless: Statuses and codes of entries that are not differences.
        other_failure: Why the two are not identical if no entry shows it.
        accepted: True if no difference fails with the options that accept some; None without them.
        unused_ignores: Ignore entries that matched nothing.
        failing_ignores: The number of unused ignore entries if they are the only failure.
        remedy: How the saved optimizer state could be fixed.
        has_other_notes: True if some notes are about differences outside of the two models.
        compared: Aspect (one of `ASPECTS`) -> whether a difference in it would be found.
        scope: How exactly values were compared, or the option that compares them.
        outlines: The known tensors of the left and of the right, by key, in its order.
        unfixed: Keys that no command of `fix` fixes.
        rules_options: The options of a remap that uses `rules`.
        kinds: ``left`` or ``right`` -> what its compared sections are.
        section: The path of the left's section if the right is a model.
        asks: The question (`Asks`).
        names: The names of the two sides as the user wrote them.
    """

    left: str
    right: str
    identical: bool
    entries: tuple[Entry, ...]
    fix: tuple[Fix, ...] = ()
    notes: tuple[str, ...] = ()
    inferred: Inference | None = None
    rules: str | None = None
    exchangeable: tuple[tuple[str, ...], ...] = ()
    harmless: frozenset[str] = HARMLESS
    other_failure: str = ""
    accepted: bool | None = None
    unused_ignores: tuple[str, ...] = ()
    failing_ignores: int = 0
    remedy: Remedy | None = None
    has_other_notes: bool = False
    compared: Compared = field(default_factory=dict, compare=False)
    scope: str = ""
    outlines: tuple[Outlines, Outlines] = field(default=({}, {}), compare=False, repr=False)
    unfixed: tuple[Unfixed, ...] = ()
    rules_options: Any = field(default=None, compare=False, repr=False)
    kinds: Mapping[str, tuple[Kind, ...]] = field(default_factory=dict)
    section: str = ""
    asks: Asks = field(default="pair", compare=False)
    names: Sides = field(default=SIDES, compare=False)

    @property
    def passes(self) -> bool:
        """Whether the exit status is 0."""
        return self.identical if self.accepted is None else self.accepted

    def __bool__(self) -> bool:
        """Raise `CkptError`: an assertion about the diff itself would hold in both cases."""
        raise CkptError("a Diff is neither true nor false", hint="use .identical or .passes")

    @property
    def left_kinds(self) -> set[str]:
        """The names of the kinds of left's sections."""
        return {kind.name for kind in self.kinds.get("left", ())}

    def is_difference(self, entry: Entry) -> bool:
        """Return True if the entry alone means that the two are not identical."""
        return not entry.is_one_of(self.harmless)

    @property
    def summary(self) -> dict[str, int]:
        """Status -> number of entries, in the order of `STATUSES`, without zeros."""
        return count_of(STATUSES, Counter(entry.status for entry in self.entries))

    def problems(self, sides: Sides = SIDES) -> list[Problem]:
        """Return everything that differs and is not accepted as problems of an error, what no
        entry shows under the name of the left.
        """
        problems = []
        for entry in self.entries:
            if self.is_difference(entry) and entry.ignored is None:
                key = " -> ".join((*entry.left, *entry.right))
                problems.append(entry.problem(key, sides))
        return problems or [Problem(self.other_failure or "different", self.left, "torch-error")]

    @property
    def ignored(self) -> dict[str, int] | None:
        """Status -> number of ignored entries; None if no option accepts differences."""
        if self.accepted is None:
            return None
        statuses = [entry.status for entry in self.entries if entry.ignored is not None]
        return count_of(STATUSES, Counter(statuses))

    def to_json(self) -> dict[str, Any]:
        """Return the `diff` object of the contract."""
        return dict(DIFF.write(self))


_SIDES: Members = {"left": TEXTS, "right": TEXTS}
_EXPONENT = plain("an integer", lambda value: type(value) is int, {"type": "integer"})
_NUMBER = plain("a number", lambda value: type(value) in (int, float), {"type": "number"})
_CHANGE = record(
    Change,
    {
        **dict.fromkeys(("relative", "norm"), nullable(_NUMBER)),
        "maximum": _NUMBER,
        **dict.fromkeys(("differing", "elements"), COUNT),
        **dict.fromkeys(("nan_left", "nan_right", "infinite_left", "infinite_right"), COUNT),
    },
)
_ENTRY = record(
    Entry,
    {"status": one_of(*STATUSES), **_SIDES, "reason": TEXT},
    {
        **dict.fromkeys(("code", "detail", "ignored"), TEXT),
        "hook": HOOK,
        "spread": list_of(row({"exponent": _EXPONENT, "elements": COUNT})),
        "change": _CHANGE,
    },
    called={"code": lambda entry: entry.cause and entry.cause.code.code},
)
_PAIR = record(
    Pair,
    {**_SIDES, "evidence": TEXT, "transposed": nullable(unless_empty(one_of("left", "right")))},
)
_COUNTS = object_of({}, dict.fromkeys(STATUSES, COUNT))
COMPARED = object_of({}, dict.fromkeys(ASPECTS, FLAG))
DIFF = record(
    Diff,
    {
        **dict.fromkeys(("left", "right"), TEXT),
        "identical": FLAG,
        "compared": COMPARED,
        "summary": _COUNTS,
        "entries": list_of(_ENTRY),
        "fix": list_of(row({"command": TEXT, "complete": FLAG, "tried": FLAG})),
        "unfixed": list_of(record(Unfixed, {"code": TEXT, "keys": TEXTS})),
        "notes": notes_as("reader"),
    },
    {
        "exchangeable": unless_empty(list_of(TEXTS)),
        "accepted": FLAG,
        "ignored": _COUNTS,
        "unused_ignores": TEXTS,
        "suggested": list_of(_PAIR),
        "ambiguous": list_of(record(Ambiguous, {**_SIDES, "reason": TEXT})),
        "rules": nullable(TEXT),
        "kinds": unless_empty(list_of(row({"side": one_of("left", "right"), **KIND_MEMBERS}))),
        "section": unless_empty(TEXT),
    },
    called={
        "fix": lambda diff: [(str(fix), fix.complete, fix.tried) for fix in diff.fix],
        "unused_ignores": lambda diff: LEFT_OUT if diff.accepted is None else diff.unused_ignores,
        "kinds": lambda diff: [
            (side, kind.name, kind.section, kind.text)
            for side, kinds in diff.kinds.items()
            for kind in kinds
        ],
        "suggested": lambda diff: diff.inferred and diff.inferred.pairs,
        "ambiguous": lambda diff: diff.inferred and diff.inferred.ambiguous,
        "rules": lambda diff: diff.rules if diff.inferred or diff.rules else LEFT_OUT,
    },
    title="ckpttool.diff/1",
)
