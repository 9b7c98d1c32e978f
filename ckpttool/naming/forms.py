"""Plans that move a checkpoint from one form of a model's names to another: serialized keys to runtime names and back.

The way leads over the runtime tensors: first each of them as an expression over the checkpoint's keys, then the keys
that are asked for as expressions over runtime tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ckpttool import expression as ex
from ckpttool.checkpoint import Section, TensorEntry
from ckpttool.errors import Problem
from ckpttool.expression import Expression, Op, Ref
from ckpttool.naming.match import Match, match
from ckpttool.naming.names import Names
from ckpttool.plan import Dropped, ModuleRename, Output, Plan, module_renames

SERIALIZED, RUNTIME = "serialized", "runtime"
_COPIES = ("aten.clone.default", "aten.contiguous.default", "aten.detach.default", "aten.alias.default")


@dataclass(frozen=True)
class Relation:
    """How one model's runtime names and serialized keys relate, as far as plans need it."""

    names: Names

    @cached_property
    def first(self) -> dict[str, str]:
        """FQN -> the first FQN of the same tensor."""
        return {tensor.fqn: tensor.alias_of or tensor.fqn for tensor in self.names.runtime}

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """First FQN -> every FQN of that tensor, in runtime order."""
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for fqn, first in self.first.items():
            groups[first].append(fqn)
        return dict(groups)

    @cached_property
    def saved(self) -> dict[str, Expression | None]:
        """Serialized key -> what it is of runtime tensors, copies left aside (a copy has the same bytes)."""
        return {s.key: None if s.source is None else plain(s.source) for s in self.names.serialized}

    @cached_property
    def fqn_of(self) -> dict[str, str]:
        """Serialized key -> FQN, for the keys that are a runtime tensor renamed; each FQN has one key at most."""
        keys: defaultdict[str, list[str]] = defaultdict(list)
        for key, source in self.saved.items():
            if isinstance(source, Ref):
                keys[source.key].append(key)
        pairs = [pair(fqns, keys[first]) for first, fqns in self.groups.items()]
        return {key: fqn for group in pairs for fqn, key in group.items()}

    @cached_property
    def transforms(self) -> bool:
        """Whether some value is another one when it is saved, not only its name."""
        return any(isinstance(source, Op) for source in self.saved.values())

    def runtime_values(self, present: Iterable[str]) -> dict[str, Expression]:
        """Each FQN as an expression over the serialized keys in `present`; without those that they do not give.

        A key that saving only renames is that tensor; any other is what the model's own loading makes of the keys.
        """
        have = set(present)
        values: dict[str, Expression] = {fqn: Ref(key) for key, fqn in self.fqn_of.items() if key in have}
        known = {self.first[fqn] for fqn in values}
        for loaded in self.names.load:
            first = self.first.get(loaded.fqn, loaded.fqn)
            if first not in known and loaded.source is not None and have.issuperset(ex.refs(loaded.source)):
                values[loaded.fqn] = plain(loaded.source)
                known.add(first)
        return values


@dataclass(frozen=True, slots=True)
class Reading:
    """Which form a section's keys are in. `ambiguous`: they fit the other form as well, with other values."""

    form: str
    match: Match
    ambiguous: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """A plan from one form to another, and what stands against it: carry it out only where `problems` is empty."""

    plan: Plan
    problems: tuple[Problem, ...]


def pair(fqns: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Which is which among the names of one tensor on two sides: equal names first, the rest in order."""
    pairs = {fqn: fqn for fqn in fqns if fqn in keys}
    pairs.update(zip((f for f in fqns if f not in pairs), (k for k in keys if k not in pairs)))
    return pairs


def plain(source: Expression) -> Expression:
    """The expression without operators around it that only copy: to the bytes in a file they are nothing."""
    while isinstance(source, Op) and source.op in _COPIES and isinstance(source.args[0], (Ref, Op)):
        source = source.args[0]
    return source


def read(names: Names, section: Section, form: str | None = None) -> Reading:
    """Recognises the form of `section`, or reads it as `form`.

    What fits both forms is read as serialized, which is what a file holds that ``state_dict()`` made.
    """
    serialized = Reading(SERIALIZED, match(_keys(section), _serialized_names(names), _spare_keys(names)))
    runtime = Reading(RUNTIME, match(_keys(section), _runtime_names(names), _spare_fqns(names)))
    if form is not None:
        return serialized if form == SERIALIZED else runtime
    score = (*serialized.match.score, -_misfits(section, serialized, _serialized_shapes(names)))
    other = (*runtime.match.score, -_misfits(section, runtime, _runtime_shapes(names)))
    if score < other:
        return runtime
    return Reading(SERIALIZED, serialized.match, ambiguous=score == other and Relation(names).transforms)


def move(names: Names, section: Section, reading: Reading, to: str) -> Move:
    """The plan that brings `section` from the form it was read in to the form `to` (``serialized`` or ``runtime``)."""
    problems = [Problem("no name of this model", key) for key in reading.match.unmatched] + list(reading.match.problems)
    keys = {name: key for key, name in reading.match.names.items()}
    if reading.form == to:
        made = _Made([Output(section.path, name, Ref(key)) for name, key in keys.items()], [], [])
    elif to == RUNTIME:
        made = _to_runtime(Relation(names), section.path, keys)
    else:
        made = _to_serialized(Relation(names), section.path, keys)
    outputs = _in_source_order(made.outputs, section)
    modules = _modules(names, section, reading)
    return Move(Plan(tuple(outputs), tuple(made.dropped), modules), (*problems, *made.problems))


@dataclass(frozen=True, slots=True)
class _Made:
    outputs: list[Output]
    dropped: list[Dropped]
    problems: list[Problem]


def _to_runtime(relation: Relation, section: str, keys: Mapping[str, str]) -> _Made:
    values = relation.runtime_values(keys)
    made = _Made([Output(section, fqn, over(source, keys)) for fqn, source in values.items()], [], [])
    used = {key for source in values.values() for key in ex.refs(source)}
    got = {relation.first[fqn] for fqn in values}
    for key, source in relation.saved.items():
        if key in used or key not in keys:
            continue
        if source is None:  # the hook made it of nothing: it goes along under its own name
            made.outputs.append(Output(section, key, Ref(keys[key])))
        elif got.issuperset(ex.refs(source)):
            made.dropped.append(
                Dropped(section, keys[key], "a hook makes it again from other tensors when the model is saved")
            )
        else:
            made.problems.append(Problem("the model writes this key and does not read it back", key))
    made.outputs.extend(Output(section, key, Ref(keys[key])) for key in relation.names.extra_state if key in keys)
    return made


def _to_serialized(relation: Relation, section: str, keys: Mapping[str, str]) -> _Made:
    made = _Made([], [], [])
    held = {relation.first[name]: name for name in reversed(list(keys)) if name in relation.first}
    used: set[str] = set()
    for key, source in relation.saved.items():
        own = relation.fqn_of.get(key)
        if source is None or own in keys:
            name = key if source is None else own
            if name in keys:
                made.outputs.append(Output(section, key, Ref(keys[str(name)])))
                used.add(str(name))
            continue
        wanted = list(dict.fromkeys(ex.refs(source)))
        if not held.keys() & wanted or (own is not None and relation.first[own] in held):
            continue  # not in the checkpoint at all, or there under another name of the same tensor
        made.problems.extend(
            Problem(f"{key} is made of it, and the checkpoint has it not", fqn) for fqn in wanted if fqn not in held
        )
        if held.keys() >= set(wanted):
            made.outputs.append(Output(section, key, over(source, {fqn: keys[held[fqn]] for fqn in wanted})))
            used.update(held[fqn] for fqn in wanted)
    made.outputs.extend(Output(section, key, Ref(keys[key])) for key in relation.names.extra_state if key in keys)
    for name, key in keys.items():
        if name in relation.first and name not in used:
            made.dropped.append(Dropped(section, key, "the model's state_dict() leaves it out"))
    return made


def over(source: Expression, keys: Mapping[str, str]) -> Expression:
    """The expression over names as one over the checkpoint's keys."""
    found = ex.substitute(source, lambda name: Ref(keys[name]))
    assert isinstance(found, (Ref, Op))
    return found


def _in_source_order(outputs: list[Output], section: Section) -> list[Output]:
    """Outputs where their first source stood, so that a file keeps its order and a way back gives the same file."""
    place = {key: index for index, key in enumerate(_keys(section))}
    return sorted(outputs, key=lambda output: min((place[key] for key in ex.refs(output.source)), default=len(place)))


def _modules(names: Names, section: Section, reading: Reading) -> tuple[ModuleRename, ...]:
    """How ``_metadata`` follows: torch writes it by module path, so hooks leave it alone and only wrappers move it."""
    if section.modules is None or not reading.match.wrapped:
        return ()
    return module_renames(section.path, section.modules, dict(reading.match.names))


def _keys(section: Section) -> list[str]:
    return list(section.by_key())


def _serialized_names(names: Names) -> dict[str, str]:
    """Every serialized key with its canonical name: what wrappers added to the tensor it comes from is taken out."""
    canonical = {tensor.fqn: tensor.canonical for tensor in names.runtime}
    relation = Relation(names)
    found = {key: key for key in (*relation.saved, *names.extra_state)}
    found.update({key: canonical[fqn] for key, fqn in relation.fqn_of.items() if key == fqn})
    return found


def _runtime_names(names: Names) -> dict[str, str]:
    """Every FQN with its canonical name, and what has no FQN: extra state, and keys that hooks make of nothing."""
    found = {tensor.fqn: tensor.canonical for tensor in names.runtime}
    for key in (*(s.key for s in names.serialized if s.source is None), *names.extra_state):
        found.setdefault(key, key)
    return found


def _spare_keys(names: Names) -> list[str]:
    """Serialized keys that may be absent: second names of one tensor, and all that is no tensor."""
    first: dict[Expression, str] = {}
    seconds = [s.key for s in names.serialized if s.source is not None and first.setdefault(s.source, s.key) != s.key]
    return [*seconds, *names.extra_state]


def _spare_fqns(names: Names) -> list[str]:
    spare = [t.fqn for t in names.runtime if t.alias_of is not None or not t.persistent]
    return [*spare, *(s.key for s in names.serialized if s.source is None), *names.extra_state, *names.not_serialized]


Shapes = Mapping[str, tuple[str, tuple[int, ...] | None]]


def _serialized_shapes(names: Names) -> Shapes:
    return {s.key: (s.dtype, s.shape) for s in names.serialized}


def _runtime_shapes(names: Names) -> Shapes:
    return {t.fqn: (t.dtype, t.shape) for t in names.runtime}


def _misfits(section: Section, reading: Reading, shapes: Shapes) -> int:
    """How many tensors have another dtype or shape than the name they would be has."""
    have: dict[str, TensorEntry] = {entry.key: entry for entry in section.tensors}
    return sum(
        shapes.get(name) not in (None, (have[key].dtype, have[key].shape), (have[key].dtype, None))
        for key, name in reading.match.names.items()
        if key in have
    )
