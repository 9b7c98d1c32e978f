"""The steps of a rules file, and the plan that they make of a state dict: each sees what the one before it made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Union

from ckpttool.checkpoint import ExtraEntry, Section, TensorEntry
from ckpttool.edits.rules import changes
from ckpttool.edits.rules.changes import DENSE, REFUSED, Value, refusal
from ckpttool.edits.rules.patterns import Rule, matches
from ckpttool.errors import Problem, Refused
from ckpttool.expression import Ref, refs
from ckpttool.plan import Dropped, Output, Plan, module_renames
from ckpttool.words import plural

State = dict[str, Value]
Named = list[tuple[str, Value]]


@dataclass(slots=True)
class Made:
    """What a step makes of a state. `used` are the step's patterns that matched something."""

    values: Named = field(default_factory=list)
    dropped: list[Value] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    used: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Rename:
    """The first of the rules that matches a key renames it; all keys at once, so that names can be swapped."""

    where: str
    rules: tuple[Rule, ...]

    @property
    def patterns(self) -> tuple[str, ...]:
        """The rules as they were written: each has to apply to some key."""
        return tuple(rule.text for rule in self.rules)

    def one(self, key: str, value: Value, made: Made) -> Named:
        """What becomes of one entry."""
        for rule in self.rules:
            name = rule.apply(key)
            if name is not None:
                made.used.add(rule.text)
                return [(name, value)]
        return [(key, value)]


@dataclass(frozen=True, slots=True)
class Convert:
    """Every tensor that a pattern names is changed, under the same key."""

    where: str
    patterns: tuple[str, ...]
    change: changes.Change

    def one(self, key: str, value: Value, made: Made) -> Named:
        """What becomes of one entry."""
        hits = [text for text in self.patterns if matches(text, key)]
        if not hits or not self.change.concerns(value):
            return [(key, value)]
        made.used.update(hits)
        return [(key, value if value.layout == REFUSED else self.change.make(_dense(value)))]


@dataclass(frozen=True, slots=True)
class Drop:
    """Every entry that a pattern names is left out."""

    where: str
    patterns: tuple[str, ...]

    def one(self, key: str, value: Value, made: Made) -> Named:
        """What becomes of one entry."""
        hits = [text for text in self.patterns if matches(text, key)]
        if not hits:
            return [(key, value)]
        made.used.update(hits)
        made.dropped.append(value)
        return []


@dataclass(frozen=True, slots=True)
class Parts:
    """One tensor and its parts along `dim`, of these `sizes` or of equal size. The rules lead from name to name."""

    whole: str
    names: tuple[str, ...]
    to_part: tuple[Rule, ...]
    to_whole: tuple[Rule, ...]
    dim: int
    sizes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Split:
    """A tensor becomes its parts."""

    where: str
    parts: Parts

    @property
    def patterns(self) -> tuple[str, ...]:
        """What has to apply to some key: the name of the whole."""
        return (self.parts.whole,)

    def one(self, key: str, value: Value, made: Made) -> Named:
        """What becomes of one entry."""
        names = [name for name in (rule.apply(key) for rule in self.parts.to_part) if name is not None]
        if not names:
            return [(key, value)]
        made.used.add(self.parts.whole)
        if value.layout == REFUSED:
            return [(name, value) for name in names]
        return list(zip(names, changes.split(_dense(value), len(names), self.parts.dim, self.parts.sizes)))


@dataclass(frozen=True, slots=True)
class Join:
    """Parts become the tensor, at the place of the first of them."""

    where: str
    parts: Parts

    @property
    def patterns(self) -> tuple[str, ...]:
        """What has to apply to some key: the name of each part."""
        return self.parts.names


Step = Union[Rename, Convert, Drop, Split, Join]


@dataclass(frozen=True, slots=True)
class Renames:
    """What the renaming steps make of a name, one after the other: for those who have names and no tensors."""

    steps: tuple[Step, ...]

    def apply(self, key: str) -> str | None:
        """The key's new name, or None where no step renames it."""
        name = key
        for step in self.steps:
            rules = step.rules if isinstance(step, Rename) else ()
            name = next((new for new in (rule.apply(name) for rule in rules) if new is not None), name)
        return None if name == key else name


def plan_of(steps: Sequence[Step], section: Section) -> Plan:
    """The plan of the steps. Raises `Refused`, all problems at once, where they do not fit the section."""
    state = {key: _value(key, entry) for key, entry in section.by_key().items()}
    dropped: dict[str, str] = {}
    problems: list[Problem] = []
    for step in steps:
        made = _joined(step, state) if isinstance(step, Join) else _each(step, state)
        if not problems and not made.problems:  # else a key may be missing because of what is said already
            made.problems += [Problem("applies to no key", text) for text in step.patterns if text not in made.used]
        counts = Counter(key for key, _ in made.values)
        made.problems += [Problem(f"written {count} times", key) for key, count in counts.items() if count > 1]
        problems += [Problem(f"{step.where}: {one.problem}", one.key) for one in made.problems]
        dropped.update((key, step.where) for value in made.dropped for key in refs(value.source))
        state = dict(made.values)
    if problems:
        raise Refused(
            f"the rules do not fit the checkpoint: {plural(len(problems), 'problem')}",
            hint="`ckpttool inspect CKPT` lists keys and shapes; a rule sees what the rules before it have made",
            problems=problems,
        )
    return _plan(state, dropped, section)


def _plan(state: State, dropped: dict[str, str], section: Section) -> Plan:
    used = {key for value in state.values() for key in refs(value.source)}
    renamed = {value.origin: key for key, value in state.items() if value.origin is not None and value.origin != key}
    return Plan(
        tuple(Output(section.path, key, value.source) for key, value in state.items()),
        tuple(Dropped(section.path, key, reason) for key, reason in dropped.items() if key not in used),
        module_renames(section.path, section.modules or (), renamed),
    )


def _each(step: Rename | Convert | Drop | Split, state: State) -> Made:
    """The step on one entry after the other."""
    made = Made()
    for key, value in state.items():
        try:
            made.values += step.one(key, value, made)
        except Refused as error:
            made.problems.append(Problem(error.message, key))
            made.values.append((key, replace(value, layout=REFUSED)))
    return made


def _joined(step: Join, state: State) -> Made:
    """The step on groups of entries, those that are parts of the same whole."""
    made, groups, whole_of = Made(), dict[str, dict[str, str]](), dict[str, str]()
    for key in state:
        part, whole = _part(step, key, made)
        if part in groups.setdefault(whole, {}):
            made.problems.append(Problem(f"would be the same part of {whole} as {groups[whole][part]}", key))
        groups[whole][part] = key
        whole_of[key] = whole
    for key, value in state.items():
        if not whole_of[key]:
            made.values.append((key, value))
        elif whole_of[key] in groups:
            whole = whole_of[key]
            made.values.append((whole, _whole(step, whole, groups.pop(whole), state, made)))
    return made


def _part(step: Join, key: str, made: Made) -> tuple[str, str]:
    """Which part of which whole the key is; two empty strings where it is none."""
    for text, rule in zip(step.parts.names, step.parts.to_whole):
        try:
            whole = rule.apply(key)
        except Refused as error:
            made.problems.append(Problem(error.message, key))
            whole = None
        if whole is not None:
            made.used.add(text)
            return text, whole
    return key, ""


def _whole(step: Join, whole: str, keys: dict[str, str], state: State, made: Made) -> Value:
    """The value of one whole; `keys` are those of its parts, by their patterns."""
    parts = step.parts
    found = [state[keys[text]] for text in parts.names if text in keys]
    try:
        missing = [str(rule.apply(whole)) for text, rule in zip(parts.names, parts.to_part) if text not in keys]
        if missing:
            raise refusal(f"needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not there")
        if not any(value.layout == REFUSED for value in found):
            return changes.join([_dense(value) for value in found], parts.dim, parts.sizes)
    except Refused as error:
        made.problems.append(Problem(error.message, whole))
    return replace(found[0], layout=REFUSED)


def _dense(value: Value) -> Value:
    if value.layout != DENSE:
        raise refusal(f"not a dense tensor ({value.layout}): it can be renamed or dropped only")
    return value


def _value(key: str, entry: TensorEntry | ExtraEntry) -> Value:
    if isinstance(entry, ExtraEntry):
        return Value(Ref(key), "", (), key, "not a tensor")
    layout = entry.layout if entry.storage is None else DENSE
    return Value(Ref(key), entry.dtype, entry.shape, key, layout)
