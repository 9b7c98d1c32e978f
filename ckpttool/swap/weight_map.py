"""Map checkpoint keys to program FQNs, and check each new value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace

from ckpttool.containers.program import CONSTANTS, replaceable
from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, Entries, Section, Storage, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Expression, Op, Ref, Special
from ckpttool.core.names import RUNTIME, SERIALIZED, Names
from ckpttool.core.plan import ModelRun, Output, Plan
from ckpttool.core.values import dataclass
from ckpttool.evaluate.apply import apply, entry_of
from ckpttool.evaluate.chunks import in_own_storage
from ckpttool.naming import wrappers
from ckpttool.naming.convert import (
    Form,
    ModelForm,
    Reading,
    check_versions,
    plan_form_change,
    read_keys,
    with_keys,
    with_model_run,
)
from ckpttool.naming.match import Match, NameTables, match
from ckpttool.naming.wrappers import strip
from ckpttool.operands.load_plan import by_loading
from ckpttool.operands.model import ModelOperand

_LEFT_OVER = "unexpected: not a weight of the program"


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Which value each tensor of the program gets, before any value is compared.

    Attributes:
        sources: FQN -> expression over the keys of `weights`.
        form: The form of the names that the keys were read as.
        weights: The tensors of the checkpoint, or what the model has after loading it.
        problems: Tensors of the program without a value, and keys that it has no place for.
        ignored: Keys that the program has no tensor for, without a loss.
        twins: Pairs of keys that must hold the same value, because the first is not used.
        runs: Runs of the model's own code that compute a part of the sources.
        remade: Constants of the program that no checkpoint has, as the model's loading makes them.
        state_dict: The keys and values that the model loads; None if they are not known.
        loaded: How loading makes `weights` from the checkpoint, if they are what the model has.
    """

    sources: dict[str, Expression]
    form: str
    weights: Section
    problems: list[Problem] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    twins: list[tuple[str, str]] = field(default_factory=list)
    runs: tuple[ModelRun, ...] = ()
    remade: dict[str, Expression] = field(default_factory=dict)
    state_dict: Section | None = None
    loaded: Plan | None = None


def constants_of(program: Checkpoint) -> tuple[TensorEntry, ...]:
    """Return the constants of an exported program, which are not in its state dict; empty for other
    checkpoints.
    """
    return next((section.tensors for section in program.sections if section.path == CONSTANTS), ())


def canonical_names(program: Checkpoint) -> dict[str, str]:
    """Return FQN or constant -> its name without the wrappers that were around the exported
    model.
    """
    if not program.sections:
        return {}
    state_dict = program.sections[0]
    paths = wrappers.recognize([entry.key for entry in state_dict.tensors])
    names = {}
    for section in program.sections:
        for entry in section.tensors:
            names[entry.key] = strip(entry.key, paths)
    return names


def chosen_constants(program: Checkpoint, weights: Section) -> dict[str, Expression]:
    """Return constant -> its new value, for each constant of the program that one of the keys
    names.
    """
    constants = {entry.key: entry.key for entry in constants_of(program)}
    matched = match([entry.key for entry in weights.tensors], canonical_names(program))
    chosen: dict[str, Expression] = {}
    for key, name in matched.names.items():
        if name in constants:
            chosen[name] = Ref(key)
    for section in program.sections:
        if section.path == CONSTANTS:
            _share(chosen, {**constants, **section.aliases()})
    return chosen


def map_by_keys(target: Section, weights: Section, names: Mapping[str, str]) -> WeightMap:
    """Map without a model: the keys must be the program's FQNs, except for wrappers' segments on
    either side.

    `names` are the canonical ones of the program's tensors.
    """
    aliases = target.aliases()
    canonical: dict[str, str] = {}
    firsts: dict[str, str] = {}
    for entry in target.tensors:
        canonical[entry.key] = names[entry.key]
        firsts[entry.key] = aliases.get(entry.key, entry.key)
    matched = match([entry.key for entry in weights.tensors], canonical, aliases)
    sources: dict[str, Expression] = {fqn: Ref(key) for key, fqn in matched.names.items()}
    _share(sources, firsts)
    # A key without a name is fine if its tensor has another key that the program uses.
    used = {entry.identity for entry in weights.tensors if entry.key in matched.names}
    spare = {entry.key for entry in weights.tensors if entry.identity in used}
    unmatched = [key for key in matched.unmatched if key not in spare]
    problems = _misfits(unmatched, matched.problems)
    ignored = [entry.key for entry in weights.extras]
    return WeightMap(sources, RUNTIME, weights, problems, ignored, _variants(matched))


def map_by_model(
    target: Section,
    constants: Mapping[str, str],
    weights: Section,
    model: ModelOperand,
    form: Form | None,
) -> WeightMap:
    """Map with the model: its names say how each FQN is computed from the checkpoint's keys, in any
    form.

    `constants` are the program's, each with its canonical name. `form` is the form of the keys, if
    it is known; otherwise they may be keys that only the model's load hooks accept.

    key of WEIGHTS ─ `read` ─▶ name in the form ─▶ value of the model's FQN ─ `match` ─▶ program FQN
    """
    names, tables, code = model.names(), model.tables, model.code
    loaded = by_loading(model, weights) if form is None else None
    if loaded is not None:
        result = apply(loaded, Checkpoint.of(weights))
        weights = replace(result.section(weights.path), form=RUNTIME)
    form_name = form.names if isinstance(form, ModelForm) else None
    reading = read_keys(tables, weights, form_name)
    keys = {name: key for key, name in reading.match.names.items()}
    values: dict[str, Expression] = {}
    meaning: Mapping[str, Expression | None]
    if reading.form == RUNTIME:
        meaning = {fqn: Ref(first) for fqn, first in tables.first.items()}
        for fqn, key in keys.items():
            if fqn in tables.first:
                values[fqn] = Ref(key)
    else:
        meaning = tables.saved
        check_versions(names, weights, reading)
        for fqn, source in tables.runtime_values(keys).items():
            values[fqn] = with_keys(source, keys)
    plan = Plan(tuple(Output(weights.path, fqn, source) for fqn, source in values.items()))
    if code is not None:
        plan = with_model_run(plan, tables, weights, reading, code.arguments)
        values = {output.key: output.source for output in plan.outputs}
    _share(values, tables.first)
    canonical = {tensor.fqn: tensor.canonical for tensor in names.runtime}
    matched = match([entry.key for entry in target.tensors], canonical)
    sources = {fqn: values[name] for fqn, name in matched.names.items() if name in values}
    weight_map = WeightMap(
        sources,
        reading.form,
        weights,
        problems=_misfits(reading.match.unmatched, reading.match.problems),
        twins=_variants(reading.match),
        runs=plan.runs,
        remade=_remade(constants, names, values),
        state_dict=_state_dict(tables, weights, reading),
        loaded=loaded,
    )
    _add_unused(weight_map, keys, meaning)
    weight_map.problems[:] = _with_unknown(weight_map.problems, matched.unmatched)
    return weight_map


def _state_dict(tables: NameTables, weights: Section, reading: Reading) -> Section | None:
    """Return the weights as the model loads them; None if only its own code can compute them."""
    moved = plan_form_change(tables, weights, reading, SERIALIZED)
    try:
        return apply(moved.plan, Checkpoint.of(weights)).section(weights.path)
    except Refused:
        return None


def _remade(
    constants: Mapping[str, str], names: Names, values: Mapping[str, Expression]
) -> dict[str, Expression]:
    """Return the constants that the model's loading computes from the checkpoint, with these
    values.
    """
    unsaved = {}
    for tensor in names.runtime:
        if not tensor.persistent and tensor.fqn in values:
            unsaved[tensor.canonical] = values[tensor.fqn]
    remade = {}
    for constant, name in constants.items():
        if name in unsaved and not ex.is_constant(unsaved[name]):
            remade[constant] = unsaved[name]
    return remade


def _add_unused(
    weight_map: WeightMap,
    keys: dict[str, str],
    meaning: Mapping[str, Expression | None],
) -> None:
    """Add the keys that no source reads.

    A key may have a twin that means the same and is read. One that is a tensor of the model, which
    the program does not have, is left over: a problem. One that a hook computes, or that is not a
    tensor, is ignored. `keys` and `meaning` are by name.
    """
    used = set(ex.refs(tuple(weight_map.sources.values())))
    used_by_meaning = {}
    for name, key in reversed(keys.items()):
        if key in used:
            used_by_meaning[meaning.get(name)] = key
    for name, key in keys.items():
        source = meaning.get(name)
        if key in used:
            continue
        if source is not None and source in used_by_meaning:
            weight_map.twins.append((key, used_by_meaning[source]))
        elif isinstance(source, Ref):
            weight_map.problems.append(Problem(_LEFT_OVER, key, "left_over"))
        else:
            weight_map.ignored.append(key)


def _with_unknown(problems: Sequence[Problem], unknown: Sequence[str]) -> list[Problem]:
    """Return the problems, and one for each weight of the program that is `unknown` to the model. A
    key that is left over and has its name is not a further problem.
    """
    left_over = [problem.key for problem in problems if problem.kind == "left_over"]
    shared = match(left_over, {fqn: fqn for fqn in unknown}).names
    result = [problem for problem in problems if problem.key not in shared]
    for fqn in unknown:
        if fqn in shared.values():
            text = "the program and the weights have this name, the model has no such tensor"
            result.append(Problem(text, fqn, "not_in_model"))
        else:
            text = "the model has no tensor of this name: is it another model?"
            result.append(Problem(text, fqn, "missing"))
    return result


def _share(values: dict[str, Expression], first: Mapping[str, str]) -> None:
    """Give a name without a value the value of another name of the same tensor. `first`: name ->
    the first name of its tensor.
    """
    by_first = {first[fqn]: source for fqn, source in reversed(values.items())}
    for fqn, first_name in first.items():
        if first_name in by_first:
            values.setdefault(fqn, by_first[first_name])


def _misfits(unmatched: Iterable[str], problems: Iterable[Problem]) -> list[Problem]:
    return [*(Problem(_LEFT_OVER, key, "left_over") for key in unmatched), *problems]


def _variants(matched: Match) -> list[tuple[str, str]]:
    """Return the keys of call variants of an unflattened program, each with the key whose value is
    used for its name.
    """
    keys = {name: key for key, name in matched.names.items()}
    return [(key, keys[name]) for key, name in matched.variants.items()]


# Values


def fit_all(
    targets: Sequence[TensorEntry],
    sources: Mapping[str, Expression],
    entries: Entries,
    cast: bool,
    any_layout: bool,
) -> tuple[dict[str, TensorEntry], list[Problem]]:
    """Return the new value of each of the targets, and a problem for each that has none or does not
    fit it.

    The `sources` are over `entries`. With `cast` dtypes are converted, with `any_layout` a value
    need not be dense.
    """
    fitted: dict[str, TensorEntry] = {}
    problems: list[Problem] = []
    for target in targets:
        source = sources.get(target.key)
        if source is None:
            problems.append(Problem("missing weight", target.key, "missing"))
            continue
        value = _fit(target, source, entries, cast, any_layout)
        if isinstance(value, Problem):
            problems.append(value)
        else:
            fitted[target.key] = value
    return fitted, problems


def _fit(
    target: TensorEntry, source: Expression, entries: Entries, cast: bool, any_layout: bool
) -> TensorEntry | Problem:
    if ex.is_opaque(source):
        text = "a hook computes it by code that is not a tensor operator"
        return Problem(text, target.key, "opaque")
    origin = "from " + ", ".join(dict.fromkeys(ex.refs(source)))
    if target.storage is None and not any_layout:
        value = entries.get(source.key) if isinstance(source, Ref) else None
        return _fit_pickled(target, value, origin)
    try:
        value = _value(target.key, source, entries, any_layout)
        if value.shape != target.shape:
            text = f"shape {list(value.shape)}, the program has {list(target.shape)} ({origin})"
            return Problem(text, target.key, "shape")
        if value.dtype == target.dtype:
            return value
        if not cast:
            text = f"dtype {value.dtype}, the program has {target.dtype} ({origin})"
            return Problem(text, target.key, "dtype")
        dtype = ("dtype", Special("dtype", target.dtype))
        converted = Op("aten._to_copy.default", (source,), (dtype,))
        return _value(target.key, converted, entries)
    except Refused as error:
        return Problem(error.message, target.key)


def _fit_pickled(entry: TensorEntry, value: object, origin: str) -> TensorEntry | Problem:
    """Return the value for a tensor that is not dense: only one that is pickled as the same kind
    can replace it.
    """
    if not isinstance(value, TensorEntry) or not replaceable(entry, value):
        text = f"{entry.layout}, and its new value is not pickled as such a tensor ({origin})"
        return Problem(text, entry.key)
    if (value.shape, value.dtype) != (entry.shape, entry.dtype):
        expected = f"the program has {entry.dtype} {list(entry.shape)}"
        return Problem(f"{value.dtype} {list(value.shape)}, {expected}", entry.key)
    return replace(value, key=entry.key)


def _value(fqn: str, source: Expression, entries: Entries, any_layout: bool = False) -> TensorEntry:
    if isinstance(source, Ref):
        entry = entries[source.key]
        if isinstance(entry, TensorEntry) and (any_layout or entry.storage is not None):
            return replace(entry, key=fqn)
        raise Refused(
            f"{source.key} is not a dense tensor",
            hint="only dense tensors can be put into a program",
        )
    return entry_of(fqn, source, entries)


def replaced(
    entries: Sequence[TensorEntry], fitted: Mapping[str, TensorEntry]
) -> tuple[TensorEntry, ...]:
    """Return the program's entries on their new storages, with the geometry that the program gave
    them.

    Storages without a new value are the old ones.
    """
    by_storage: defaultdict[Storage, list[TensorEntry]] = defaultdict(list)
    for entry in entries:
        if entry.storage is not None:
            by_storage[entry.storage].append(entry)
    storages = {}
    for storage, group in by_storage.items():
        if any(entry.key in fitted for entry in group):
            storages[storage] = _storage(storage, group, fitted)
    result = []
    for entry in entries:
        new = fitted.get(entry.key)
        if entry.storage is not None:
            entry = replace(entry, storage=storages.get(entry.storage, entry.storage))
        elif new is not None and replaceable(entry, new):
            entry = replace(entry, payload=new.payload)
        result.append(entry)
    return tuple(result)


def _storage(
    old: Storage, entries: Sequence[TensorEntry], fitted: Mapping[str, TensorEntry]
) -> Storage:
    """Return the storage for the new values of `entries`: as it is if one value fills it, else put
    together.
    """
    first = entries[0]
    new = next(fitted[entry.key] for entry in entries if entry.key in fitted)
    fills_storage = first.is_contiguous and first.nbytes == old.nbytes
    is_one_tensor = all(entry.identity == first.identity for entry in entries)
    if is_one_tensor and fills_storage and new.storage is not None:
        storage = in_own_storage(new).storage  # of a view, only its elements
        assert storage is not None
        return storage
    from ckpttool.evaluate import torch_eval

    return torch_eval.arrange(old, [(entry, fitted.get(entry.key, entry)) for entry in entries])
