"""Plans from one form of a model's names to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from enum import Enum
from typing import TypeVar, Union

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Section
from ckpttool.core.errors import Problem, Refused, same_problem
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.names import RUNTIME, SERIALIZED, Names
from ckpttool.core.plan import Dropped, ModelRun, ModuleRename, Output, Plan, Why, module_renames
from ckpttool.core.tables import inverse, new_paths, positions, shapes_of
from ckpttool.core.text import Note, plural, title_of
from ckpttool.core.values import dataclass
from ckpttool.naming import wrappers
from ckpttool.naming.match import Match, NameTables, match
from ckpttool.naming.versions import version_text
from ckpttool.naming.wrappers import Chain

T = TypeVar("T")

_MADE_AGAIN = "a hook makes it again from other tensors when the model is saved"
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


def form_names() -> tuple[str, ...]:
    """Return the names of all forms, and of the wrappers."""
    return (*WORDS, *wrappers.WORDS)


def parse_form(word: str) -> Form:
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


def read_keys(tables: NameTables, section: Section, form: str | None = None) -> Reading:
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
    as_serialized = _score(serialized, section, tables)
    as_runtime = _score(runtime, section, tables)
    if as_serialized == as_runtime:
        if section.has_runtime_names:
            return runtime
        return replace(serialized, ambiguous=not tables.forms_agree)
    return serialized if as_serialized > as_runtime else runtime


def _score(reading: Reading, section: Section, tables: NameTables) -> tuple[bool, int, int]:
    """Return the score of the names, and then how many tensors have the model's dtype and shape."""
    names = reading.match.names
    misfits = 0
    for entry in section.tensors:
        expected = tables.likeness(names.get(entry.key, ""), reading.form)
        if expected is None or not expected.dtype:
            continue
        if entry.dtype != expected.dtype or expected.shape not in (None, entry.shape):
            misfits += 1
    return (*reading.match.score, -misfits)


def is_complete_model(tables: NameTables, section: Section) -> bool:
    """Return whether `section` is the complete model in one of its forms, without other keys or
    shapes.
    """
    reading = read_keys(tables, section)
    if not reading.match.complete:
        return False
    shapes = shapes_of(section.tensors)
    for key, name in reading.match.names.items():
        shape = tables.shape_of(name, reading.form)
        if shape not in (None, shapes.get(key)):
            return False
    return True


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
    outputs: list[Output] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    copies: list[tuple[str, str]] = field(default_factory=list)

    def keep(self, names: Iterable[str]) -> None:
        """Keep entries that are not runtime tensors under their names."""
        for name in names:
            if name in self.keys:
                self.copy(name, name)

    def drop(self, name: str, reason: str, twin: str | None, why: Why = "other") -> None:
        """Drop `name`; `twin` is the name of the same tensor that is kept."""
        self.dropped.append(Dropped(self.section, self.keys[name], reason, why))
        if twin is not None:
            self.copies.append((self.keys[name], self.keys[twin]))

    def add(self, key: str, source: Expression, keys: Mapping[str, str]) -> None:
        """Add an output that is computed from the tensors with these names; `keys` maps the names
        to keys.
        """
        self.outputs.append(Output(self.section, key, with_keys(source, keys)))

    def copy(self, key: str, name: str) -> None:
        """Add an output that is the entry with this name."""
        self.outputs.append(Output(self.section, key, Ref(self.keys[name])))


def plan_form_change(
    tables: NameTables, section: Section, reading: Reading, to: str, tie: bool = True
) -> FormPlan:
    """Return the plan from the form of `section` to the form `to` (``serialized`` or ``runtime``).

    `tie`: a tensor with several names in that form gets all of them, also if the checkpoint has
    only one.
    """
    draft = _PlanDraft(section.path, inverse(reading.match.names))
    draft.problems.extend(same_problem("not a key of this model", reading.match.unmatched))
    draft.problems.extend(reading.match.problems)
    if reading.form == to:
        draft.keep(draft.keys)
    elif to == RUNTIME:
        _to_runtime(tables, draft, tie)
    else:
        _to_serialized(tables, draft)
    if tie and to == SERIALIZED:
        sources = {output.key: output.source for output in draft.outputs}
        for key, source in _second_keys(tables, sources).items():
            draft.outputs.append(Output(section.path, key, source))
    outputs = _ordered(draft.outputs, section, tables.canonical_names(to))
    # torch writes `_metadata` by module path: only wrappers move it, hooks do not.
    modules: tuple[ModuleRename, ...] = ()
    if section.modules is not None and reading.match.wrapped:
        modules = module_renames(section.path, section.modules, dict(reading.match.names))
    plan = Plan(tuple(outputs), tuple(draft.dropped), modules)
    return FormPlan(plan, tuple(draft.problems), tuple(draft.copies))


def _to_runtime(tables: NameTables, draft: _PlanDraft, tie: bool) -> None:
    values = tables.runtime_values(draft.keys)
    # first FQN -> value; a tensor with several values has the first of them
    by_first: dict[str, Expression] = {}
    for fqn, source in values.items():
        by_first.setdefault(tables.first[fqn], source)
    # a program loads its second names strictly, too
    for tensor in tables.names.runtime if tie else ():
        if tensor.persistent and tensor.alias_of in by_first:
            values.setdefault(tensor.fqn, by_first[tensor.alias_of])
    used: set[str] = set()
    for fqn, source in values.items():
        draft.add(fqn, source, draft.keys)
        used.update(ex.refs(source))
    for key, saved in tables.saved.items():
        if key in used or key not in draft.keys or saved is None:
            continue
        if not by_first.keys() >= set(ex.refs(saved)):
            problem = "the model writes this key and does not read it back"
            draft.problems.append(Problem(problem, key))
            continue
        value = by_first[saved.key] if isinstance(saved, Ref) else None
        twin = value.key if isinstance(value, Ref) else None
        draft.drop(key, _MADE_AGAIN, twin, "made_again")
    draft.keep(tables.keys_without_tensor)
    draft.keep(tables.names.extra_state)


def _to_serialized(tables: NameTables, draft: _PlanDraft) -> None:
    # first FQN -> the first of its names that the checkpoint has
    held: dict[str, str] = {}
    for name in draft.keys:
        if name in tables.first:
            held.setdefault(tables.first[name], name)
    keys = {first: draft.keys[name] for first, name in held.items()}
    used: dict[str, str] = {}  # name -> its first FQN
    for key, source in tables.saved.items():
        if source is None:  # of no runtime tensor
            draft.keep([key])
            continue
        fqn_of_key = tables.fqn_of.get(key)
        if fqn_of_key is not None and fqn_of_key in draft.keys:  # that tensor, perhaps renamed
            draft.copy(key, fqn_of_key)
            used[fqn_of_key] = tables.first[fqn_of_key]
            continue
        if fqn_of_key is not None and _has_key(tables, draft, fqn_of_key):
            continue  # the key is a second name
        fqns = list(dict.fromkeys(ex.refs(source)))
        missing = [fqn for fqn in fqns if fqn not in held]
        if fqns and len(missing) == len(fqns):
            continue  # the checkpoint has nothing of it
        if missing:
            problem = f"{key} is computed from it, and the checkpoint does not have it"
            draft.problems.extend(same_problem(problem, missing))
            continue
        draft.add(key, source, keys)
        for fqn in fqns:
            used[held[fqn]] = fqn
    draft.keep(tables.names.extra_state)
    _drop_unused(tables, draft, used)


def _drop_unused(tables: NameTables, draft: _PlanDraft, used: Mapping[str, str]) -> None:
    """Drop runtime tensors that no key uses; `used`: name -> its first FQN."""
    used_name = inverse(used)
    for name in draft.keys:
        if name not in tables.first or name in used:
            continue
        twin = used_name.get(tables.first[name])
        reason = "the model's state_dict() leaves it out"
        if twin is not None:
            reason = f"the model ties it to {draft.keys[twin]}"
        draft.drop(name, reason, twin)


def _has_key(tables: NameTables, draft: _PlanDraft, fqn: str) -> bool:
    """Return whether the checkpoint has the tensor under a name that has its own key."""
    keys = tables.keys_of[tables.first[fqn]]
    return any(tables.fqn_of.get(key) in draft.keys for key in keys)


def _second_keys(tables: NameTables, values: Mapping[str, T]) -> dict[str, T]:
    """Return values for the other keys of the tensors that `values` has: strict loading wants all
    of them.
    """
    by_fqn: dict[str, T] = {}
    others: dict[str, str] = {}  # key without a value -> first FQN
    for key, source in tables.saved.items():
        if isinstance(source, Ref):
            if key in values:
                by_fqn[source.key] = values[key]
            else:
                others[key] = source.key
    return {key: by_fqn[fqn] for key, fqn in others.items() if fqn in by_fqn}


def with_keys(source: Expression, keys: Mapping[str, str]) -> Expression:
    """Return the expression over names as one over the checkpoint's keys."""

    def key_of(name: str) -> Expression:
        return Ref(keys[name])

    return ex.substitute(source, key_of)


def _ordered(outputs: list[Output], section: Section, names: Iterable[str]) -> list[Output]:
    """Order the outputs as their first sources, so that a file keeps its order and the reverse
    remap gives the same file.

    If that is the order of the model's `names`, values computed from several sources are where the
    model has them: of q, k, v, norm  ─▶  norm, qkv in a model that saves norm first.
    """
    place = positions(section.by_key())
    rank = positions(names)
    readers = Counter[str]()
    first_place: dict[str, int] = {}
    for output in outputs:
        keys = list(ex.refs(output.source))
        readers.update(keys)
        first_place[output.key] = min(map(place.__getitem__, keys), default=len(place))
    by_place = sorted(outputs, key=lambda output: first_place[output.key])
    # of tensors that no other output reads
    ranks = []
    for output in by_place:
        if isinstance(output.source, Ref) and readers[output.source.key] == 1:
            ranks.append(rank[output.key])
    if ranks == sorted(ranks):
        return sorted(by_place, key=lambda output: rank[output.key])
    return by_place


def with_model_run(
    plan: Plan, tables: NameTables, section: Section, reading: Reading, kwargs: Mapping[str, object]
) -> Plan:
    """Return the plan of a form change with opaque values left to a run of the model's own code.

    The model, built with `kwargs`, loads all its keys in the section, or gets all its tensors in
    the section.
    """
    if not any(ex.is_opaque(output.source) for output in plan.outputs):
        return plan
    way = ex.LOADED if reading.form == SERIALIZED else ex.SAVED
    outputs = []
    for output in plan.outputs:
        if ex.is_opaque(output.source):
            output = replace(output, source=ex.by_code(way, output.key, output.source))
        outputs.append(output)
    names = reading.match.names
    given = {names[key]: Ref(key) for key in section.by_key() if key in names}
    if way == ex.LOADED:
        given.update(_second_keys(tables, given))
    run = ModelRun(section.path, way, tables.names.model, kwargs, given)
    return replace(plan, outputs=tuple(outputs), runs=(run,))


# Versions of modules


def other_versions(names: Names, section: Section, reading: Reading) -> list[Problem]:
    """Return the modules whose version differs from the model's: `names` describe loading of the
    model's versions.
    """
    modules = section.modules or {}
    renames = module_renames(section.path, modules, dict(reading.match.names))
    paths = new_paths(renames)
    versions: dict[str, object] = {}
    for path, payload in modules.items():
        version = payload.get("version") if isinstance(payload, Mapping) else None
        versions[paths.get(path, path)] = version
    problems = []
    for path, version in (names.versions or {}).items():
        saved = versions.get(path)
        if saved != version:
            problem = f"{version_text(saved)}, and the model saves {version_text(version)}"
            problems.append(Problem(problem, title_of(path)))
    return problems


def check_versions(names: Names, section: Section, reading: Reading) -> None:
    """Raise `Refused` for other versions of modules: how the model converts their values is
    unknown.
    """
    problems = other_versions(names, section, reading)
    if not problems:
        return
    load = "load it by these names"
    if reading.form == SERIALIZED:
        load = "model.load_state_dict(torch.load(CKPT))"
    count = plural(len(problems), "module")
    raise Refused(
        f"the file was saved by other versions of {count} of {names.model}",
        hint=f"let the model load it, and save that again: {load};"
        " torch.save(model.state_dict(), OUT)",
        problems=problems,
    )
