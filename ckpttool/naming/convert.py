"""Plans from one form of a model's names to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum
from typing import TypeVar, Union

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Section
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.names import RUNTIME, SERIALIZED, Names
from ckpttool.core.plan import Dropped, ModelRun, Output, Plan, module_renames
from ckpttool.core.text import Note, plural
from ckpttool.core.values import dataclass
from ckpttool.naming import wrappers
from ckpttool.naming.match import Likeness, Match, NameTables, match
from ckpttool.naming.wrappers import Chain

T = TypeVar("T")

# a reason to drop a key
MADE_AGAIN = "a hook makes it again from other tensors when the model is saved"
NOT_READ_BACK = Note(
    "this model does not read back all that it writes: see `ckpttool trace`", "roundtrip"
)

# Forms


class ModelForm(Enum):
    """A form of a model's own names, by the word for it."""

    SERIALIZED = "serialized"
    RUNTIME = "runtime"
    EXPORTED = "exported"
    UNFLATTENED = "unflattened"
    PRETRAINED = "pretrained"

    @property
    def names(self) -> str:
        """The one of the two lists of `Names` that has its names.

        An exported program has the runtime names since torch 2.6 (pytorch#137609). The names that
        ``save_pretrained`` writes have a separate `Names`.
        """
        return SERIALIZED if self in (ModelForm.SERIALIZED, ModelForm.PRETRAINED) else RUNTIME

    def __str__(self) -> str:
        return self.value


Form = Union[ModelForm, Chain]
WORDS = tuple(form.value for form in ModelForm)


def words() -> tuple[str, ...]:
    """Return the names of all forms, and of the wrappers."""
    return (*WORDS, *wrappers.WORDS)


def parse(word: str) -> Form:
    """``exported``, ``ddp(compile)`` -> the form. Raises `CkptError` for other words."""
    return ModelForm(word) if word in WORDS else wrappers.parse(word)


@dataclass(frozen=True, slots=True)
class Reading:
    """The form of a section's keys. `ambiguous`: they fit the other form as well, with other
    values.
    """

    form: str
    match: Match
    ambiguous: bool = False


def read(tables: NameTables, section: Section, form: str | None = None) -> Reading:
    """Recognize the form of `section`, unless it is given or recorded in the section.

    Keys that fit both forms are read as serialized, which is what ``state_dict()`` returns; those
    of programs and pickled modules as runtime names.
    """
    form = form or section.form
    keys = list(section.by_key())
    serialized = Reading(SERIALIZED, match(keys, tables.serialized_names, tables.spare_keys))
    runtime = Reading(RUNTIME, match(keys, tables.runtime_names, tables.spare_fqns))
    if form is not None:
        return serialized if form == SERIALIZED else runtime
    entries = {entry.key: (entry.dtype, entry.shape) for entry in section.tensors}

    def score(reading: Reading, likeness: Mapping[str, Likeness]) -> tuple[bool, int, int]:
        pairs = (
            (entries[key], likeness.get(name))
            for key, name in reading.match.names.items()
            if key in entries
        )
        misfits = sum(wanted not in (None, actual, (actual[0], None)) for actual, wanted in pairs)
        return (*reading.match.score, -misfits)

    as_serialized = score(serialized, tables.serialized_likeness)
    as_runtime = score(runtime, tables.runtime_likeness)
    if as_serialized == as_runtime:
        if section.has_runtime_names:
            return runtime
        return replace(serialized, ambiguous=not tables.forms_agree)
    return serialized if as_serialized > as_runtime else runtime


def holds(tables: NameTables, section: Section) -> bool:
    """Return whether `section` is the complete model in one of its forms, without other keys or
    shapes.
    """
    reading = read(tables, section)
    likeness = tables.serialized_likeness if reading.form == SERIALIZED else tables.runtime_likeness
    shapes = {entry.key: entry.shape for entry in section.tensors}
    return reading.match.complete and all(
        likeness.get(name, ("", None))[1] in (None, shapes.get(key))
        for key, name in reading.match.names.items()
    )


# Plans


@dataclass(frozen=True, slots=True)
class FormPlan:
    """A plan from one form to another. Do not apply it if there are `problems`.

    `copies` are pairs of keys of which the result keeps the second only: if their values differ,
    the first is lost.
    """

    plan: Plan
    problems: tuple[Problem, ...]
    copies: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class _PlanDraft:
    """A plan under construction. `keys`: name of the form of the checkpoint -> key of the
    checkpoint.
    """

    section: str
    keys: Mapping[str, str]
    outputs: list[Output]
    dropped: list[Dropped]
    problems: list[Problem]
    copies: list[tuple[str, str]]

    def keep(self, names: Iterable[str]) -> None:
        """Keep entries that are not runtime tensors under their names."""
        self.outputs.extend(
            Output(self.section, name, Ref(self.keys[name])) for name in names if name in self.keys
        )

    def drop(self, name: str, reason: str, twin: str | None) -> None:
        """Drop `name`; `twin` is the name of the same tensor that is kept."""
        self.dropped.append(Dropped(self.section, self.keys[name], reason))
        if twin is not None:
            self.copies.append((self.keys[name], self.keys[twin]))


def move(
    tables: NameTables, section: Section, reading: Reading, to: str, tie: bool = True
) -> FormPlan:
    """Return the plan from the form of `section` to the form `to` (``serialized`` or ``runtime``).

    `tie`: a tensor with several names in that form gets all of them, also if the checkpoint has
    only one.
    """
    problems = [Problem("not a key of this model", key) for key in reading.match.unmatched]
    keys = {name: key for key, name in reading.match.names.items()}
    draft = _PlanDraft(section.path, keys, [], [], [*problems, *reading.match.problems], [])
    if reading.form == to:
        draft.keep(draft.keys)
    elif to == RUNTIME:
        _to_runtime(tables, draft, tie)
    else:
        _to_serialized(tables, draft)
    if tie and to == SERIALIZED:
        second = _second_keys(tables, {output.key: output.source for output in draft.outputs})
        draft.outputs.extend(Output(section.path, key, source) for key, source in second.items())
    outputs = _ordered(
        draft.outputs, section, tables.runtime_names if to == RUNTIME else tables.serialized_names
    )
    # torch writes `_metadata` by module path: only wrappers move it, hooks do not.
    is_moved = section.modules is not None and reading.match.wrapped
    modules = (
        module_renames(section.path, section.modules or (), dict(reading.match.names))
        if is_moved
        else ()
    )
    return FormPlan(
        Plan(tuple(outputs), tuple(draft.dropped), modules),
        tuple(draft.problems),
        tuple(draft.copies),
    )


def _to_runtime(tables: NameTables, draft: _PlanDraft, tie: bool) -> None:
    values = tables.runtime_values(draft.keys)
    by_first = {tables.first[fqn]: source for fqn, source in reversed(values.items())}
    # a program loads its second names strictly, too
    for tensor in tables.names.runtime if tie else ():
        if tensor.persistent and tensor.alias_of in by_first:
            values.setdefault(tensor.fqn, by_first[tensor.alias_of])
    draft.outputs.extend(
        Output(draft.section, fqn, with_keys(source, draft.keys)) for fqn, source in values.items()
    )
    used = {key for source in values.values() for key in ex.refs(source)}
    kept = {tables.first[fqn]: source for fqn, source in reversed(values.items())}
    for key, source in tables.saved.items():
        if key in used or key not in draft.keys or source is None:
            continue
        if kept.keys() >= set(ex.refs(source)):
            same = kept[source.key] if isinstance(source, Ref) else None
            draft.drop(key, MADE_AGAIN, same.key if isinstance(same, Ref) else None)
        else:
            draft.problems.append(
                Problem("the model writes this key and does not read it back", key)
            )
    draft.keep(key for key, source in tables.saved.items() if source is None)
    draft.keep(tables.names.extra_state)


def _to_serialized(tables: NameTables, draft: _PlanDraft) -> None:
    held = {tables.first[name]: name for name in reversed(list(draft.keys)) if name in tables.first}
    used: set[str] = set()
    for key, source in tables.saved.items():
        name = tables.fqn_of.get(key)
        if source is None:
            draft.keep([key])
        elif name is not None and name in draft.keys:
            draft.outputs.append(Output(draft.section, key, Ref(draft.keys[name])))
            used.add(name)
        elif name is None or not any(
            tables.fqn_of.get(other) in draft.keys for other in tables.keys_of[tables.first[name]]
        ):  # else the tensor has another name with its own key
            wanted = list(dict.fromkeys(ex.refs(source)))
            missing = [fqn for fqn in wanted if fqn not in held]
            if not missing:
                keys = {fqn: draft.keys[held[fqn]] for fqn in wanted}
                draft.outputs.append(Output(draft.section, key, with_keys(source, keys)))
                used.update(held[fqn] for fqn in wanted)
            elif len(missing) < len(wanted):  # else nothing of it is in the checkpoint
                reason = f"{key} is made of it, and the checkpoint has it not"
                draft.problems.extend(Problem(reason, fqn) for fqn in missing)
    draft.keep(tables.names.extra_state)
    used_name = {tables.first[name]: name for name in used}
    for name in draft.keys:
        if name not in tables.first or name in used:
            continue
        twin = used_name.get(tables.first[name])
        reason = (
            "the model's state_dict() leaves it out"
            if twin is None
            else f"the model ties it to {draft.keys[twin]}"
        )
        draft.drop(name, reason, twin)


def _second_keys(tables: NameTables, values: Mapping[str, T]) -> dict[str, T]:
    """Return values for the other keys of the tensors that `values` has: strict loading wants all
    of them.
    """
    sources = {key: source for key, source in tables.saved.items() if isinstance(source, Ref)}
    by_source = {source: values[key] for key, source in sources.items() if key in values}
    return {
        key: by_source[source]
        for key, source in sources.items()
        if key not in values and source in by_source
    }


def with_keys(source: Expression, keys: Mapping[str, str]) -> Expression:
    """Return the expression over names as one over the checkpoint's keys."""

    def key_of(name: str) -> Expression:
        return Ref(keys[name])

    return ex.substitute(source, key_of)


def _ordered(outputs: list[Output], section: Section, names: Iterable[str]) -> list[Output]:
    """Order the outputs as their first sources, so that a file keeps its order and the way back
    gives the same file.

    If that is the order of the model's `names`, values computed from several sources are where the
    model has them.
    """
    place = {key: index for index, key in enumerate(section.by_key())}
    rank = {name: index for index, name in enumerate(names)}
    by_place = sorted(
        outputs,
        key=lambda output: min((place[key] for key in ex.refs(output.source)), default=len(place)),
    )
    readers = Counter(key for output in outputs for key in ex.refs(output.source))
    alone = [o.key for o in by_place if isinstance(o.source, Ref) and readers[o.source.key] == 1]
    if alone == sorted(alone, key=rank.__getitem__):
        return sorted(by_place, key=lambda output: rank[output.key])
    return by_place


def left_to_code(
    plan: Plan, tables: NameTables, section: Section, reading: Reading, kwargs: Mapping[str, object]
) -> Plan:
    """Return the plan of `move` with opaque values left to a run of the model's own code.

    The model, built with `kwargs`, loads all its keys in the section, or gets all its tensors in
    the section.
    """
    if not any(ex.is_opaque(output.source) for output in plan.outputs):
        return plan
    way = ex.LOADED if reading.form == SERIALIZED else ex.SAVED
    names = reading.match.names
    given = {names[key]: Ref(key) for key in section.by_key() if key in names}
    if way == ex.LOADED:
        given.update(_second_keys(tables, given))
    outputs = (
        replace(o, source=ex.by_code(way, o.key, o.source)) if ex.is_opaque(o.source) else o
        for o in plan.outputs
    )
    run = ModelRun(section.path, way, tables.names.model, kwargs, given)
    return replace(plan, outputs=tuple(outputs), runs=(run,))


# Versions of modules


def other_versions(names: Names, section: Section, reading: Reading) -> list[Problem]:
    """Return the modules whose version differs from the model's: `names` describe loading of the
    model's versions.
    """

    def text(version: object) -> str:
        return "no version" if version is None else f"version {version}"

    modules = section.modules or {}
    moved = {m.old: m.new for m in module_renames(section.path, modules, dict(reading.match.names))}
    versions = {moved.get(path, path): _version(payload) for path, payload in modules.items()}
    return [
        Problem(
            f"{text(versions.get(path))}, and the model saves {text(version)}", path or "(root)"
        )
        for path, version in (names.versions or {}).items()
        if versions.get(path) != version
    ]


def check_versions(names: Names, section: Section, reading: Reading) -> None:
    """Raise `Refused` for other versions of modules: how the model converts their values is
    unknown.
    """
    problems = other_versions(names, section, reading)
    if problems:
        load = (
            "model.load_state_dict(torch.load(CKPT))"
            if reading.form == SERIALIZED
            else ("load it by these names")
        )
        raise Refused(
            f"{names.model} reads other versions of its modules differently:"
            f" {plural(len(problems), 'module')}",
            hint=f"let the model load it, and save that again: {load};"
            " torch.save(model.state_dict(), OUT)",
            problems=problems,
        )


def _version(payload: object) -> object:
    return payload.get("version") if isinstance(payload, Mapping) else None
