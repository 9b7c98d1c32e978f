"""Plans from one form of a model's names to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum
from typing import TypeVar, Union

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Section, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.names import RUNTIME, SERIALIZED, Names
from ckpttool.core.plan import Dropped, ModelRun, ModuleRename, Output, Plan, module_renames
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass
from ckpttool.naming import wrappers
from ckpttool.naming.match import Likeness, Match, NameTables, match
from ckpttool.naming.wrappers import Chain

T = TypeVar("T")

MADE_AGAIN = "a hook makes it again from other tensors when the model is saved"  # a reason to drop a key


@dataclass(frozen=True, slots=True)
class Reading:
    """Which form a section's keys are in. `ambiguous`: they fit the other form as well, with other values."""

    form: str
    match: Match
    ambiguous: bool = False


@dataclass(frozen=True, slots=True)
class FormPlan:
    """A plan from one form to another, and what stands against it: carry it out only where `problems` is empty.

    `copies` are pairs of keys of the checkpoint of which the result keeps the second only; where their values differ,
    that of the first would be lost.
    """

    plan: Plan
    problems: tuple[Problem, ...]
    copies: tuple[tuple[str, str], ...] = ()


def read(tables: NameTables, section: Section, form: str | None = None) -> Reading:
    """Recognises the form of `section`, or reads it as `form`, or as the form that is recorded in it.

    What fits both forms is read as serialized, which is what a file holds that ``state_dict()`` made.
    """
    form = form or section.form
    keys = list(section.by_key())
    serialized = Reading(SERIALIZED, match(keys, tables.serialized_names, tables.spare_keys))
    runtime = Reading(RUNTIME, match(keys, tables.runtime_names, tables.spare_fqns))
    if form is not None:
        return serialized if form == SERIALIZED else runtime
    score = (*serialized.match.score, -_misfits(section, serialized, tables.serialized_likeness))
    other = (*runtime.match.score, -_misfits(section, runtime, tables.runtime_likeness))
    if score < other:
        return runtime
    return replace(serialized, ambiguous=score == other and not tables.forms_agree)


def holds(tables: NameTables, section: Section) -> bool:
    """Whether `section` is the whole model in one of its forms: every name, no other key, no other shape."""
    reading = read(tables, section)
    likeness = tables.serialized_likeness if reading.form == SERIALIZED else tables.runtime_likeness
    have = {entry.key: entry.shape for entry in section.tensors}
    return reading.match.complete and all(
        likeness.get(name, ("", None))[1] in (None, have.get(key)) for key, name in reading.match.names.items()
    )


def _misfits(section: Section, reading: Reading, likeness: Mapping[str, Likeness]) -> int:
    """How many tensors have another dtype or shape than the name they would be has."""
    have: dict[str, TensorEntry] = {entry.key: entry for entry in section.tensors}
    return sum(
        likeness.get(name) not in (None, (have[key].dtype, have[key].shape), (have[key].dtype, None))
        for key, name in reading.match.names.items()
        if key in have
    )


def move(tables: NameTables, section: Section, reading: Reading, to: str, tie: bool = True) -> FormPlan:
    """The plan that brings `section` from the form it was read in to the form `to` (``serialized`` or ``runtime``).

    `tie`: what has several names in that form gets all of them, also where the checkpoint has one of them alone.
    """
    made = _Made(section.path, {name: key for key, name in reading.match.names.items()}, [], [], [], [])
    made.problems.extend(Problem("no name of this model", key) for key in reading.match.unmatched)
    made.problems.extend(reading.match.problems)
    if reading.form == to:
        made.outputs.extend(Output(section.path, name, Ref(key)) for name, key in made.keys.items())
    elif to == RUNTIME:
        _to_runtime(tables, made, tie)
    else:
        _to_serialized(tables, made)
    if tie and to == SERIALIZED:
        second = _second_keys(tables, {output.key: output.source for output in made.outputs})
        made.outputs.extend(Output(section.path, key, source) for key, source in second.items())
    names = tables.runtime_names if to == RUNTIME else tables.serialized_names
    outputs = _ordered(made.outputs, section, names)
    plan = Plan(tuple(outputs), tuple(made.dropped), _modules(section, reading))
    return FormPlan(plan, tuple(made.problems), tuple(made.copies))


def left_to_code(
    plan: Plan, tables: NameTables, section: Section, reading: Reading, kwargs: Mapping[str, object]
) -> Plan:
    """`plan`, which `move` made, with what it cannot say in operators left to a run of the model's own code.

    The model, built with `kwargs`, loads all that the section has of its keys, or gets all that it has of its tensors.
    """
    if not any(ex.is_opaque(output.source) for output in plan.outputs):
        return plan
    way = ex.LOADED if reading.form == SERIALIZED else ex.SAVED
    read_as = reading.match.names
    given = {read_as[key]: Ref(key) for key in section.by_key() if key in read_as}
    if way == ex.LOADED:
        given.update(_second_keys(tables, given))
    outputs = (
        replace(o, source=ex.by_code(way, o.key, o.source)) if ex.is_opaque(o.source) else o for o in plan.outputs
    )
    run = ModelRun(section.path, way, tables.names.model, kwargs, given)
    return replace(plan, outputs=tuple(outputs), runs=(run,))


def _second_keys(tables: NameTables, have: Mapping[str, T]) -> dict[str, T]:
    """The further keys of the tensors that `have` holds under one of theirs: strict loading wants them all."""
    held = {source: have[key] for key, source in tables.saved.items() if key in have and isinstance(source, Ref)}
    return {
        key: held[source]
        for key, source in tables.saved.items()
        if key not in have and isinstance(source, Ref) and source in held
    }


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan that is being made. `keys`: name of the form that the checkpoint was read in -> key of the checkpoint."""

    section: str
    keys: Mapping[str, str]
    outputs: list[Output]
    dropped: list[Dropped]
    problems: list[Problem]
    copies: list[tuple[str, str]]

    def keep(self, names: Iterable[str]) -> None:
        """What is no runtime tensor goes along under its own name."""
        self.outputs.extend(Output(self.section, name, Ref(self.keys[name])) for name in names if name in self.keys)

    def drop(self, name: str, reason: str, twin: str | None) -> None:
        """Leaves out `name`; `twin` is the name of the same tensor that is kept."""
        self.dropped.append(Dropped(self.section, self.keys[name], reason))
        if twin is not None:
            self.copies.append((self.keys[name], self.keys[twin]))


def _to_runtime(tables: NameTables, made: _Made, tie: bool) -> None:
    values = tables.runtime_values(made.keys)
    known = {tables.first[fqn]: source for fqn, source in reversed(values.items())}
    for tensor in tables.names.runtime if tie else ():  # strict loading of a program wants its second names too
        if tensor.persistent and tensor.alias_of in known:
            values.setdefault(tensor.fqn, known[tensor.alias_of])
    made.outputs.extend(Output(made.section, fqn, with_keys(source, made.keys)) for fqn, source in values.items())
    used = {key for source in values.values() for key in ex.refs(source)}
    kept = {tables.first[fqn]: source for fqn, source in reversed(values.items())}
    for key, source in tables.saved.items():
        if key in used or key not in made.keys or source is None:
            continue
        if kept.keys() >= set(ex.refs(source)):
            same = kept[source.key] if isinstance(source, Ref) else None
            twin = same.key if isinstance(same, Ref) else None
            made.drop(key, MADE_AGAIN, twin)
        else:
            made.problems.append(Problem("the model writes this key and does not read it back", key))
    made.keep(key for key, source in tables.saved.items() if source is None)
    made.keep(tables.names.extra_state)


def _to_serialized(tables: NameTables, made: _Made) -> None:
    held = {tables.first[name]: name for name in reversed(list(made.keys)) if name in tables.first}
    used: set[str] = set()
    for key, source in tables.saved.items():
        own = tables.fqn_of.get(key)
        if source is None:
            made.keep([key])
        elif own is not None and own in made.keys:
            made.outputs.append(Output(made.section, key, Ref(made.keys[own])))
            used.add(own)
        elif not _is_there(own, tables, made):
            used.update(_computed(key, source, held, made))
    made.keep(tables.names.extra_state)
    for name in made.keys:
        if name in tables.first and name not in used:
            twin = held[tables.first[name]]
            made.drop(name, "the model's state_dict() leaves it out", twin if twin in used else None)


def _is_there(own: str | None, tables: NameTables, made: _Made) -> bool:
    """Whether the tensor stands under another name that has a key of its own."""
    keys = () if own is None else tables.keys_of[tables.first[own]]
    return any(tables.fqn_of.get(key) in made.keys for key in keys)


def _computed(key: str, source: Expression, held: Mapping[str, str], made: _Made) -> list[str]:
    """Adds the output `key` where the checkpoint has what it is made of; the names that it is made of."""
    wanted = list(dict.fromkeys(ex.refs(source)))
    missing = [fqn for fqn in wanted if fqn not in held]
    if len(missing) == len(wanted):
        return []  # not in the checkpoint at all
    made.problems.extend(Problem(f"{key} is made of it, and the checkpoint has it not", fqn) for fqn in missing)
    if missing:
        return []
    made.outputs.append(Output(made.section, key, with_keys(source, {fqn: made.keys[held[fqn]] for fqn in wanted})))
    return [held[fqn] for fqn in wanted]


def with_keys(source: Expression, keys: Mapping[str, str]) -> Expression:
    """The expression over names as one over the checkpoint's keys."""

    def key_of(name: str) -> Expression:
        return Ref(keys[name])

    return ex.substitute(source, key_of)


def _ordered(outputs: list[Output], section: Section, names: Iterable[str]) -> list[Output]:
    """Outputs where their first source stood, so that a file keeps its order and a way back gives the same file.

    Where that is the order of the model's own `names`, what is made of several sources stands where the model has it.
    """
    place = {key: index for index, key in enumerate(section.by_key())}
    rank = {name: index for index, name in enumerate(names)}
    by_place = sorted(
        outputs, key=lambda output: min((place[key] for key in ex.refs(output.source)), default=len(place))
    )
    readers = Counter(key for output in outputs for key in ex.refs(output.source))
    alone = [o.key for o in by_place if isinstance(o.source, Ref) and readers[o.source.key] == 1]
    if alone == sorted(alone, key=rank.__getitem__):
        return sorted(by_place, key=lambda output: rank[output.key])
    return by_place


def _modules(section: Section, reading: Reading) -> tuple[ModuleRename, ...]:
    """How ``_metadata`` follows: torch writes it by module path, so hooks leave it alone and only wrappers move it."""
    if section.modules is None or not reading.match.wrapped:
        return ()
    return module_renames(section.path, section.modules, dict(reading.match.names))


class ModelForm(Enum):
    """A form of a model's own names, by the word for it."""

    SERIALIZED = "serialized"
    RUNTIME = "runtime"
    EXPORTED = "exported"
    UNFLATTENED = "unflattened"
    PRETRAINED = "pretrained"

    @property
    def names(self) -> str:
        """Which of the two lists of `Names` it takes its names from.

        An exported program has the runtime names since torch 2.6 (pytorch#137609). What ``save_pretrained`` writes has
        the names of a `Names` of its own.
        """
        return SERIALIZED if self in (ModelForm.SERIALIZED, ModelForm.PRETRAINED) else RUNTIME

    def __str__(self) -> str:
        return self.value

    @property
    def needs_model(self) -> bool:
        """Whether only the model can tell these names."""
        return self is not ModelForm.SERIALIZED


Form = Union[ModelForm, Chain]
WORDS = tuple(form.value for form in ModelForm)


def parse(word: str) -> Form:
    """``exported``, ``ddp(compile)`` -> the form. Raises `CkptError` for words that name none."""
    return ModelForm(word) if word in WORDS else wrappers.parse(word)


def versions_in(names: Names, section: Section, reading: Reading) -> Mapping[str, object]:
    """Module path -> the version that the section has of it, for the modules whose version `names` asks for."""
    modules = section.modules or {}
    moved = {m.old: m.new for m in module_renames(section.path, modules, dict(reading.match.names))}
    have = {moved.get(path, path): payload for path, payload in modules.items()}
    return {path: _version(have.get(path)) for path in names.versions or ()}


def other_versions(names: Names, section: Section, reading: Reading) -> list[Problem]:
    """Where the section has other versions of modules than the model saves, and loading asks for them.

    What names say of loading is said of the model's own versions.
    """
    have = versions_in(names, section, reading)
    return [
        Problem(f"{_called(have[path])}, and the model saves {_called(version)}", path or "(root)")
        for path, version in (names.versions or {}).items()
        if have[path] != version
    ]


def otherwise(left: Section, right: Section) -> list[str]:
    """The modules that both have, in other versions."""
    mine, theirs = left.modules or {}, right.modules or {}
    return [str(path) or "(root)" for path in mine if path in theirs and _version(mine[path]) != _version(theirs[path])]


def check_versions(names: Names, section: Section, reading: Reading) -> None:
    """Raises `Refused` where there are such: what that version's values are in the model's own is not known."""
    problems = other_versions(names, section, reading)
    if problems:
        load = "model.load_state_dict(torch.load(CKPT))" if reading.form == SERIALIZED else "load it by these names"
        raise Refused(
            f"{names.model} reads other versions of its modules otherwise: {plural(len(problems), 'module')}",
            hint=f"let the model load it, and save that anew: {load}; torch.save(model.state_dict(), OUT)",
            problems=problems,
        )


def _version(payload: object) -> object:
    return payload.get("version") if isinstance(payload, Mapping) else None


def _called(version: object) -> str:
    return "no version" if version is None else f"version {version}"
