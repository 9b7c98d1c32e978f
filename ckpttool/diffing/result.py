"""The result of `diff`, and why two names differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Any, Literal, Protocol

from ckpttool.core.checkpoint import Section
from ckpttool.core.names import HOOK, Hook, Names
from ckpttool.core.schema import (
    COUNT,
    FLAG,
    LEFT_OUT,
    TEXT,
    TEXTS,
    Members,
    list_of,
    nullable,
    object_of,
    one_of,
    plain,
    record,
    row,
    unless_empty,
)
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass, public
from ckpttool.naming.pairing.values import Ambiguous, Inference, Pair
from ckpttool.naming.wrappers import TABLE

HARMLESS = frozenset({"same", "alias", "not_serialized", "extra_state"})
# The same where what loads the one side is to load the other: without its second names a strict load fails.
EITHER_WAY = HARMLESS - {"alias"}
# The reason of a missing key whose tensor is there under another name: a remap through the model mends it.
TIED = "tied: the model has it under several names, kept under one of them (as save_pretrained saves it)"
# The reason of a difference in shape where it is not the sizes that differ.
KIND = "another kind of tensor"
# How the reason of a difference begins where one side at least has what is no tensor.
OBJECT = "no tensor"
# The reason of what only its bytes tell apart.
NOT_UNDERSTOOD = "a storage of no tensor that is understood"
STATUSES = (
    *("same", "renamed", "transformed", "order", "alias", "shape", "dtype", "value"),
    *("missing", "unexpected", "not_serialized", "extra_state"),
)


# What a diff can compare, in the order of reports; `compared` holds those that its question is about. `objects` are
# entries that are not tensors (``epoch``, ``args``, extra state), `code` is that of a program.
ASPECTS = (
    *("keys", "shapes", "dtypes", "values", "aliases", "metadata"),
    *("optimizers", "other_sections", "objects", "code"),
)
Compared = Mapping[str, bool]
# What compares values if one side is a model, which has none.
NO_VALUES = "`diff LEFT RIGHT --values` compares those of two checkpoints"


# A side in a sentence: no part of a key, a path or a quotation.
_LEFT, _RIGHT = (re.compile(rf"(?<![\w.`'\"/-])(?:the )?{side}(?![\w`\"/-]|\.\w)") for side in ("left", "right"))


def count_of(names: Iterable[str], count: Mapping[str, int]) -> dict[str, int]:
    """Name -> how often, in the order of `names`, without zeros."""
    return {name: count[name] for name in names if count.get(name)}


def with_sides(text: str, left: str, right: str) -> str:
    """A reason or a note, with other words for the two sides: for who compares no `left` with a `right`."""
    return _LEFT.sub(left, _RIGHT.sub(right, text))


class Outline(Protocol):
    """What is told of a tensor beside its key; the shape is None where it hangs on values."""

    @property
    def dtype(self) -> str:
        """Torch's name without ``torch.``."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Its sizes."""


Outlines = Mapping[str, Outline]


def outlines(section: Section) -> Outlines:
    """The tensors of a section, by key."""
    return {entry.key: entry for entry in section.tensors}


def names_outlines(names: Names) -> tuple[Outlines, Outlines]:
    """What a model saves, by key, and its own tensors, by FQN."""
    return {key.key: key for key in names.serialized}, {tensor.fqn: tensor for tensor in names.runtime}


@dataclass(frozen=True, slots=True)
class Entry:
    """One finding. `reason` is one sentence for all entries with the same cause; `detail` is this entry's own.

    `ignored` is why a pipeline lives with it.
    `spread` is how far other values are apart, where that was measured: pairs of ``(exponent of 2, elements)``.
    """

    status: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    reason: str = ""
    hook: Hook | None = None
    detail: str | None = None
    spread: tuple[tuple[int, int], ...] | None = None
    ignored: str | None = None

    @property
    def why(self) -> str:
        """The reason, and by which hook."""
        hook = self.hook
        return self.reason if hook is None else f"{self.reason}: {hook.function} ({hook.file}:{hook.line})"


ONLY_LEFT, ONLY_RIGHT = "only left has it", "only right has it"


def only_left(key: str, reason: str = ONLY_LEFT, hook: Hook | None = None, detail: str | None = None) -> Entry:
    """The finding that the right has nothing under the left's key."""
    return Entry("unexpected", (key,), (), reason, hook, detail)


def only_right(key: str, reason: str = ONLY_RIGHT, hook: Hook | None = None, detail: str | None = None) -> Entry:
    """The finding that the left has nothing under the right's key."""
    return Entry("missing", (), (key,), reason, hook, detail)


@dataclass(frozen=True, slots=True)
class Remedy:
    """What should mend a saved optimizer's state; `edits.mend` tries it.

    `way`: its parameters put in order by their names (``by_name``); put into the groups of the optimizer that is to
    load it (``regroup``); the model that saved it named (``old_model``); its state left out (``afresh``). For two saved
    ones: the left brought into the right's order and groups (``like_right``), or only its keys into the right's form
    (``keys``; ``keys_by_model`` where that takes a model). `form` is that of the keys, None for the one that they have.

    With ``old_model`` the command has to say more: `same_groups`, whether the optimizer that saved the file can be the
    one that is to load it (None: its ids are in the model's order), and `foreign_keys`, tensors beside it that the new
    model has no place for.
    """

    way: Literal["by_name", "regroup", "old_model", "afresh", "like_right", "keys", "keys_by_model"]
    form: str | None = None
    same_groups: bool | None = None
    foreign_keys: tuple[str, ...] = ()


@public
@dataclass(frozen=True, slots=True)
class Diff:
    """The answer of `diff`. `fix` are commands that can be pasted; `notes` are sentences about no single key.

    `inferred` is what may be one tensor under two names, where no model was there to ask: suggestions, on which
    `identical` does not rest; `rules` is the text of a rules file that carries them out. None where the question does
    not arise, and where there are no such rules. `exchangeable` are keys of one shape in the same layers, which only
    their names tell apart: a tuple for each shape. `harmless` are the statuses whose entries do not stand against
    `identical`; `beyond` says what does that no entry shows. `accepted` says whether all that does is what a
    pipeline lives with, where it was said what that is; `unused_ignores` are lines of it that spoke of nothing,
    and `failing_ignores` how many of them are the only reason why it fails.
    `aside` is whether `notes` tell of what else is not the same, or was not compared, beside the two models.
    `compared` says whether a difference in each of the `ASPECTS` would be found, and `scope` how exactly values were
    compared, or what compares them.
    `outlines` are the tensors of each side by key, in its own order, as far as they are known.
    """

    left: str
    right: str
    identical: bool
    entries: tuple[Entry, ...]
    fix: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    inferred: Inference | None = None
    rules: str | None = None
    exchangeable: tuple[tuple[str, ...], ...] = ()
    harmless: frozenset[str] = HARMLESS
    beyond: str = ""
    accepted: bool | None = None
    unused_ignores: tuple[str, ...] = ()
    failing_ignores: int = 0
    remedy: Remedy | None = None
    aside: bool = False
    compared: Compared = field(default_factory=dict, compare=False)
    scope: str = ""
    outlines: tuple[Outlines, Outlines] = field(default=({}, {}), compare=False, repr=False)

    @property
    def passes(self) -> bool:
        """Whether the exit status is 0."""
        return self.identical if self.accepted is None else self.accepted

    def weighs(self, entry: Entry) -> bool:
        """Whether the entry stands against `identical`."""
        return entry.status not in self.harmless

    @property
    def summary(self) -> dict[str, int]:
        """Status -> number of entries, in the order of `STATUSES`, without zeros."""
        return count_of(STATUSES, Counter(entry.status for entry in self.entries))

    def to_json(self) -> dict[str, Any]:
        """The `diff` object of the contract."""
        return dict(DIFF.write(self))

    @property
    def ignored(self) -> dict[str, int] | None:
        """Status -> number of ignored entries; None where it was not said what is."""
        if self.accepted is None:
            return None
        return count_of(STATUSES, Counter(entry.status for entry in self.entries if entry.ignored is not None))


_SIDES: Members = {"left": TEXTS, "right": TEXTS}
_EXPONENT = plain("an integer", lambda value: type(value) is int, {"type": "integer"})
_ENTRY = record(
    Entry,
    {"status": one_of(*STATUSES), **_SIDES, "reason": TEXT},
    {"hook": HOOK, "detail": TEXT, "spread": list_of(row({"exponent": _EXPONENT, "elements": COUNT})), "ignored": TEXT},
)
_PAIR = record(Pair, {**_SIDES, "evidence": TEXT, "transposed": nullable(unless_empty(one_of("left", "right")))})
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
        "fix": TEXTS,
        "notes": TEXTS,
    },
    {
        "exchangeable": unless_empty(list_of(TEXTS)),
        "accepted": FLAG,
        "ignored": _COUNTS,
        "unused_ignores": TEXTS,
        "suggested": list_of(_PAIR),
        "ambiguous": list_of(record(Ambiguous, {**_SIDES, "reason": TEXT})),
        "rules": nullable(TEXT),
    },
    called={
        "unused_ignores": lambda diff: LEFT_OUT if diff.accepted is None else diff.unused_ignores,
        "suggested": lambda diff: diff.inferred and diff.inferred.pairs,
        "ambiguous": lambda diff: diff.inferred and diff.inferred.ambiguous,
        "rules": lambda diff: diff.rules if diff.inferred or diff.rules else LEFT_OUT,
    },
    title="ckpttool.diff/1",
)


FLAT = "FSDP1's flat parameter: all parameters of its module end to end, in the files of all ranks"


_REORDERED = "the same wrappers in another order"


def segment_change(old: str, new: str) -> str:
    """How a name became another, in words: ``hides the segment `layer` ``."""
    a, b = old.split("."), new.split(".")
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    end = 0
    while end < min(len(a), len(b)) - start and a[-1 - end] == b[-1 - end]:
        end += 1
    gone, come = ".".join(a[start : len(a) - end]), ".".join(b[start : len(b) - end])
    if gone and come:
        return f"turns `{gone}` into `{come}`"
    return f"hides the segment `{gone}`" if gone else f"adds the segment `{come}`"


def segment_reason(left: str, right: str) -> str:
    """Why two names of one tensor differ, where wrappers' segments are all that differs."""
    a, b = left.split("."), right.split(".")
    return _segments_reason(_more(a, b), _more(b, a)) or ("" if left == right else _REORDERED)


def _more(segments: Iterable[str], others: Sequence[str]) -> tuple[str, ...]:
    """The segments that are not among the others, or not as often."""
    rest, more = list(others), []
    for segment in segments:
        if segment in rest:
            rest.remove(segment)
        else:
            more.append(segment)
    return tuple(more)


@cache
def _segments_reason(left: tuple[str, ...], right: tuple[str, ...]) -> str:
    return "; ".join(f"{side} {_wrapped_in(more)}" for side, more in (("left", left), ("right", right)) if more)


def _wrapped_in(segments: Sequence[str]) -> str:
    """The wrappers that put the segments there: ``is wrapped in torch.compile (`_orig_mod`)``."""
    found: dict[str, list[str]] = {}
    for segment in segments:
        found.setdefault(_title(segment, segments), []).append(segment)
    prefix = found.pop("", [])
    titles = [f"{title} (`{'.'.join(dict.fromkeys(own))}`)" for title, own in found.items()]
    wrapped = ["is wrapped in " + " and ".join(titles)] if titles else []
    return " and ".join([*wrapped, *([f"has the prefix `{'.'.join(prefix)}`"] if prefix else [])])


def _title(segment: str, others: Sequence[str]) -> str:
    """Whose segment it is; empty for a common prefix that is no wrapper's."""
    if segment == "model" and "base_model" not in others:  # PEFT's only below its `base_model`
        return ""
    return " or ".join(row.title for row in TABLE if row.segment == segment)


def hidden_segments(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Notes on keys that only one side has and that differ from one of the other side by one segment: likely a hook.

    Said as a hint and nothing more: without the model nobody knows.
    """
    entries = list(entries)
    missing = [entry.right[0] for entry in entries if entry.status == "missing"]
    unexpected = [entry.left[0] for entry in entries if entry.status == "unexpected"]
    found: Counter[tuple[str, str]] = Counter()
    for side, longer, shorter in (("left", missing, unexpected), ("right", unexpected, missing)):
        known, dots = set(shorter), {key.count(".") + 1 for key in shorter}
        for key in longer:
            if key.count(".") not in dots:
                continue
            parts = key.split(".")
            hits = {part for i, part in enumerate(parts) if ".".join(parts[:i] + parts[i + 1 :]) in known}
            if len(hits) == 1:
                found[side, hits.pop()] += 1
    return tuple(
        f"{plural(count, 'key')} of the {side} without a segment `{segment}` that the other side has: a state_dict "
        "hook may hide it (pass --model to know)"
        for (side, segment), count in found.items()
    )
