"""The optimizer part of a remap: whose state it is, and the new names, order and groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.names import SERIALIZED, Names
from ckpttool.core.optimizer_state import FLAT, ID, OptimizerState, Param, ParamGroup, renamed
from ckpttool.core.plan import OptimizerMove, Plan
from ckpttool.core.text import plural, some
from ckpttool.core.values import dataclass
from ckpttool.naming import wrappers
from ckpttool.naming.wrappers import strip
from ckpttool.operands.checkpoint import saved_state_dicts
from ckpttool.optimizers import forms
from ckpttool.optimizers.forms import class_of, lacking, with_new_options
from ckpttool.optimizers.identify import (
    Parameters,
    ParamMap,
    check,
    in_file,
    in_model,
    own_names,
    owners,
    saved_order,
)
from ckpttool.optimizers.transform import (
    arranged,
    between,
    carry,
    changed_options,
    from_serialized,
    grouped,
    identity,
    in_form,
    in_groups,
    move_of,
    placed,
    to_serialized,
)
from ckpttool.ruleset.patterns import Renaming


def new_groups(
    named: OptimizerState,
    sources: Mapping[str, Expression],
    old: Names | None,
    new: Names | None,
    was: str,
    to: str,
    where: str,
) -> tuple[ParamGroup, ...]:
    """Return the new param groups: the new optimizer's, or else the old ones in the new model's
    order.

    `named` is the state under canonical names, `sources` each new parameter as an expression over
    these, `was` and `to` are the old and the new form of the keys; `old` are the names of the model
    that saved it, `new` of the model that loads it, None for the same one. Raise `Refused` if it is
    unknown to which group a parameter belongs.
    """
    target = new or old
    if target is None:
        return placed(named, sources)
    parameters = Parameters(target)
    if new is None and to != ID:
        return _ordered_like(placed(named, sources), parameters.groups)
    if parameters.groups and (target.optimizer or target.optimizer_groups):
        if new is None:
            _same_parameters(named, parameters, where)
        groups = arranged(
            named, sources, parameters.groups, target.optimizer_groups, by_parameter=was == FLAT
        )
        if new is None:
            return groups
        return with_new_options(groups, parameters.fresh_optimizer, parameters.first_step, named)
    layout = _in_model_order(named, sources, old, parameters)
    if layout is not None:
        return arranged(named, sources, [layout], ())
    if to != ID:
        return placed(named, sources)
    if any(name not in sources for name in parameters.trainable):
        raise Refused(
            f"{where} has {len(named.groups)} param groups, and the new model has parameters that"
            " it has not",
            hint="pass --to-optimizer O, the function that makes the new optimizer",
            problems=[
                Problem("in which group?", name)
                for name in parameters.trainable
                if name not in sources
            ],
        )
    rank = {name: place for place, name in enumerate(parameters.shapes)}
    groups = placed(named, sources)
    return tuple(
        grouped(sorted(own.params, key=lambda name: rank[str(name)]), own.options) for own in groups
    )


def _ordered_like(
    groups: tuple[ParamGroup, ...], wanted: Sequence[Sequence[str]]
) -> tuple[ParamGroup, ...]:
    """Return the groups in the optimizer's order, if they are the same, so that loading by position
    works too.
    """
    own = {frozenset(map(str, group.params)): group for group in groups}
    if len(own) != len(groups) or own.keys() != {frozenset(params) for params in wanted}:
        return groups
    return tuple(grouped(params, own[frozenset(params)].options) for params in wanted)


def _same_parameters(named: OptimizerState, parameters: Parameters, where: str) -> None:
    """Raise `Refused` if the optimizer has other parameters than the file: a change of form loses
    nothing.
    """
    have, want = (
        set(map(str, named.params)),
        {name for group in parameters.groups for name in group},
    )
    problems = [
        Problem("in the file, and not in the optimizer", name) for name in sorted(have - want)
    ]
    problems += [
        Problem("in the optimizer, and not in the file", name) for name in sorted(want - have)
    ]
    if problems:
        raise Refused(
            f"{where} was not saved by this optimizer: its parameters are others",
            hint="--to-model and --to-optimizer name what is to load it",
            problems=problems,
        )


def _in_model_order(
    named: OptimizerState,
    sources: Mapping[str, Expression],
    saved_by: Names | None,
    parameters: Parameters,
) -> list[str] | None:
    """Return the parameters of an optimizer with one group, in ``model.parameters()`` order; None
    if it has more.

    It holds the same as before: all parameters of the model, or all trainable ones, or only its
    own.
    """
    if len(named.nonempty_groups) != 1:
        return None
    old = Parameters(saved_by) if saved_by is not None else parameters
    have = set(map(str, named.params))
    for mine, theirs in (
        (set(old.shapes), tuple(parameters.shapes)),
        (set(old.trainable), parameters.trainable),
    ):
        if have == mine:
            return list(theirs)
    return [name for name in parameters.shapes if name in sources]


AFRESH = "convert the model alone (CKPT::SECTION), and start the optimizer afresh"


@dataclass(frozen=True, slots=True)
class OptimizerRequest:
    """The form of the keys that the optimizers get, and the models that saved them and will load
    them.

    `names` are the names of the model (and the optimizer) that saved the checkpoint, `to_names` of
    the model that will load it. `form` ``serialized`` gives parameters the names of the model's
    keys; otherwise they get canonical names. `ruled` is the effect of the rules on the model,
    `model` the effect of the complete remap, `model_keys` its keys. `narrowed` is `model` if some
    of its tensors are left out: then parameters that have names follow their keys. `state_dicts`
    are those of the file as it was saved (`operands.checkpoint.saved_state_dicts`): the order of
    their keys is evidence for the ids. `old_model` is the same command with the model named that
    saved the file, `output` the file to write.
    """

    keys: str | None = None
    names: Names | None = None
    to_names: Names | None = None
    rules: Sequence[Renaming] = ()
    form: str | None = None
    ruled: RuleEffect | None = None
    model: RuleEffect | None = None
    narrowed: RuleEffect | None = None
    model_keys: Sequence[str] = ()
    state_dicts: Sequence[Section] | None = None
    old_model: str | None = None
    output: str | None = None


@dataclass(frozen=True, slots=True)
class OptimizerRemap:
    """The result for one optimizer.

    `evidence` is what identified its ids; `new` are parameters without state, `dropped` are
    parameters whose state has no place in the new optimizer. `move` is the change as a plan records
    it. `loaded_by` are the names of the model that will load it, if that is known.
    """

    section: str
    was: str
    to: str
    params: int
    evidence: str | None = None
    new: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    move: OptimizerMove | None = field(default=None, compare=False)
    loaded_by: Names | None = field(default=None, compare=False)


def remap_optimizers(
    source: Checkpoint, wanted: OptimizerRequest
) -> tuple[Checkpoint, tuple[OptimizerRemap, ...]]:
    """Return `source` with every optimizer as requested, and a record of each optimizer that
    changed.

    Raise `Refused` if ids are ambiguous, if state cannot follow its parameter, and if `wanted.keys`
    is set but the file has no optimizer.
    """
    if wanted.state_dicts is None:
        wanted = replace(wanted, state_dicts=saved_state_dicts(source))
    sections: list[Section] = []
    done: list[OptimizerRemap] = []
    for section in source.sections:
        changed = _remapped(section, wanted) if section.kind == "optimizer" else None
        sections.append(section if changed is None else changed[0])
        if changed is not None:
            done.append(changed[1])
    if wanted.keys is not None and not source.optimizers:
        raise Refused(
            f"{source.source} holds no optimizer",
            hint=f"`{source.inspect_call}` lists its sections; leave the option out",
        )
    return (replace(source, sections=tuple(sections)) if done else source), tuple(done)


def _remapped(section: Section, wanted: OptimizerRequest) -> tuple[Section, OptimizerRemap] | None:
    """Return the section as requested; None if it is so already."""
    where = section.title
    state = forms.read(section)
    to = wanted.keys or state.form
    listed = in_file(state)[0]
    narrowed = wanted.narrowed
    if (
        narrowed is not None
        and state.form == to == ID
        and wanted.to_names is None
        and narrowed.keeps_rest
    ):
        rest = _without_left_out(section, state, wanted, narrowed)
        if rest is not None:
            return rest
    if narrowed is not None:
        by_key = (
            wanted.model is None or narrowed.loses(list(listed.values()))
            if listed is not None
            else to != ID
        )
        wanted = (
            replace(wanted, ruled=narrowed, model=narrowed)
            if by_key
            else replace(wanted, narrowed=None)
        )
    asked = wanted.to_names is not None or (wanted.keys is not None and wanted.names is not None)
    if not state.params or not (asked or to != state.form or _is_renamed(state, wanted, to)):
        return None
    wanted = _rules_first(state, wanted, where)
    if (
        wanted.to_names is not None
        and wanted.names is None
        and wanted.ruled is None
        and listed is None
    ):
        raise Refused(
            "the names of the model that saved the checkpoint are needed",
            hint="pass --model MODEL too",
        )
    named, known, own = _named(state, wanted, where)
    sources, follow_keys = _sources(named, wanted, to, where)
    if wanted.to_names is not None:
        sources = _of_new_model(sources, wanted.to_names, where)
    # the parameters may have other names than this model's
    saved_by = None if follow_keys else wanted.names
    if to == ID and wanted.to_names is None:  # one new parameter for each old one
        called = {ref: name for name, source in sources.items() for ref in ex.refs(source)}
        old_groups = new_groups(
            named, identity(named.params), wanted.names, None, state.form, to, where
        )
        groups = tuple(
            grouped([called.get(str(p), p) for p in group.params], group.options)
            for group in old_groups
        )
    else:
        groups = new_groups(named, sources, saved_by, wanted.to_names, state.form, to, where)
    held = {
        str(param): sources[str(param)]
        for group in groups
        for param in group.params
        if param in sources
    }
    shapes: dict[str, tuple[int, ...] | None] = {}
    if wanted.ruled is not None:
        shapes.update(wanted.ruled.shapes(list(map(str, named.params))))
    if wanted.names is not None:
        shapes.update(Parameters(wanted.names).shapes)
    moved = in_groups(named, groups, carry(named, held, shapes, where))
    _check_loads(moved, saved_by, wanted.to_names, where)
    if wanted.names is not None and any(isinstance(source, Op) for source in own.values()):
        # the keys are the file's parameters
        in_file_shapes = {key.key: key.shape for key in wanted.names.serialized}
    else:
        in_file_shapes = {
            ref: shapes.get(name) for name, source in own.items() for ref in ex.refs(source)
        }
    spelled = {param: str(param) for param in moved.params} | _as_the_keys(
        state, moved, wanted, to, where
    )
    over = {spelled[name]: ex.substitute(made, own.__getitem__) for name, made in held.items()}
    new = tuple(spelled[param] for param in moved.params if param not in sources)
    moved = renamed(moved, spelled)
    move = move_of(section, state, to, moved.groups, over, in_file_shapes)
    made = in_form(moved, to)
    if made == state and not asked:
        return None
    read = {ref for made_of in held.values() for ref in ex.refs(made_of)}
    dropped = tuple(str(param) for param in named.state if param not in read)
    notes = _notes(where, state, moved, to, new, dropped)
    changed = changed_options(named, sources, groups)
    if changed:
        notes = (
            *notes,
            f"{where}: new param groups have the values that the code sets: {some(changed, 20)}",
        )
    if known is not None and known.assumed:
        notes = (*notes, known.rests_on(where))
    evidence = None if known is None else known.evidence
    params, loads = len(moved.params), wanted.to_names
    report = OptimizerRemap(
        section.path, state.form, to, params, evidence, new, dropped, notes, move, loads
    )
    return forms.write(made, section), report


def _without_left_out(
    section: Section, state: OptimizerState, wanted: OptimizerRequest, narrowed: RuleEffect
) -> tuple[Section, OptimizerRemap] | None:
    """Return an optimizer with ids without the parameters whose tensors are left out; None if it
    keeps all of them.

    The other parameters are numbered again, as an optimizer of the smaller model does. Raise
    `Refused` if nothing says whose state the ids are, and one of them may belong to a tensor that
    is left out.
    """
    where = section.title
    known = _identified(state, wanted, where)
    if known is None:
        # else --select: a note says that the state is that of all parameters
        if wanted.model is not None:
            _check_none_left_out(state, narrowed, where)
        return None
    keys_of = _serialized_keys(wanted.names)
    left_out = [
        param
        for param, name in known.names.items()
        if narrowed.loses([name, *keys_of.get(name, ())])
    ]
    if not left_out:
        return None
    if len(left_out) == len(state.params):
        raise Refused(
            f"{where}: all of its parameters are left out of the model",
            hint=f"drop the optimizer too: --drop {where}",
            problems=[Problem("left out of the model", known.names[param]) for param in left_out],
        )
    named = known.state
    kept = {known.names[param]: Ref(str(param)) for param in state.params if param not in left_out}
    groups = placed(named, identity(list(kept)))
    rest = in_groups(
        named, groups, {name: named.state[name] for name in kept if name in named.state}
    )
    dropped = tuple(known.names[param] for param in left_out)
    notes = _notes(where, state, rest, ID, (), dropped)
    if known.assumed:
        notes = (*notes, known.rests_on(where))
    move = move_of(section, state, ID, rest.groups, kept, {})
    result = forms.write(in_form(rest, ID), section)
    report = OptimizerRemap(
        section.path, ID, ID, len(kept), known.evidence, (), dropped, notes, move
    )
    if in_file(state)[0] is None:
        return result, report

    # The names of the parameters follow their keys.
    follows = _remapped(
        result, replace(wanted, names=None, ruled=narrowed, model=narrowed, narrowed=None)
    )
    if follows is None or follows[1].move is None:
        return result, report
    ids = {str(number): source for number, source in enumerate(kept.values())}
    moved = follows[1].move
    sources = {
        name: ex.substitute(source, lambda number: ids[str(number)])
        for name, source in moved.sources.items()
    }
    moved_groups = []
    for group in moved.groups:
        before = None if group.like is None else move.groups[group.like]
        moved_groups.append(group if before is None else replace(before, params=group.params))
    moved = replace(moved, sources=sources, groups=tuple(moved_groups))
    return follows[0], replace(
        report, move=moved, notes=tuple(dict.fromkeys((*notes, *follows[1].notes)))
    )


def _identified(state: OptimizerState, wanted: OptimizerRequest, where: str) -> ParamMap | None:
    """Return whose state the ids are, if the file or the model says it without a contradiction."""
    state_dicts = wanted.state_dicts or ()
    if wanted.names is None:
        return own_names(state, state_dicts)
    try:
        known = owners(state, wanted.names, where, state_dicts)
    except Refused:
        return None
    return known if known.doubt is None else None


def _serialized_keys(names: Names | None) -> dict[str, list[str]]:
    """Map the canonical name of each parameter to the serialized keys that are computed from it."""
    keys: dict[str, list[str]] = {}
    if names is None:
        return keys
    canonical = Parameters(names).canonical
    for saved in names.serialized:
        for fqn in () if saved.source is None else ex.refs(saved.source):
            if fqn in canonical:
                keys.setdefault(canonical[fqn], []).append(saved.key)
    return keys


def _check_none_left_out(state: OptimizerState, narrowed: RuleEffect, where: str) -> None:
    """Raise `Refused` if a tensor that is left out may be one of the parameters that the optimizer
    numbers.
    """
    entries = narrowed.section.by_key()
    shapes = {shape for param in state.params for shape in state.shapes(param).values() if shape}
    has_unknown = any(not any(state.shapes(param).values()) for param in state.params)
    problems = []
    for gone in narrowed.plan.dropped:
        entry = entries.get(gone.key)
        is_float = isinstance(entry, TensorEntry) and entry.dtype.startswith(
            ("float", "bfloat", "complex")
        )
        if isinstance(entry, TensorEntry) and is_float and (has_unknown or entry.shape in shapes):
            problems.append(Problem("left out of the model", gone.key))
    if problems:
        raise Refused(
            f"{where}: parameters may be left out of the model, and nothing says which of its ids"
            " are theirs",
            hint="pass --model MODEL (and --optimizer O), which says whose state it is; or drop"
            " the optimizer too: "
            f"--drop {where}",
            problems=problems,
        )


def _is_renamed(state: OptimizerState, wanted: OptimizerRequest, to: str) -> bool:
    """Return True if parameters change, or their names in the file."""
    if to != ID and (wanted.rules or wanted.form is not None):
        return True
    if wanted.rules and wanted.ruled is not None and not wanted.ruled.keeps_places:
        return True
    listed = in_file(state)[0]
    if listed is None:
        return False
    if wanted.narrowed is not None and wanted.narrowed.loses(list(listed.values())):
        return True
    return bool(wanted.rules) or (
        wanted.model is not None and wanted.model.renames(list(listed.values()))
    )


def _named(
    state: OptimizerState, wanted: OptimizerRequest, where: str
) -> tuple[OptimizerState, ParamMap | None, dict[str, Expression]]:
    """Return the state under canonical names, how they were identified, and each name as the file
    has it.
    """
    names = wanted.names
    known: ParamMap | None = None
    if names is not None and state.form != ID:
        sources = from_serialized(names, state.params)
        if sources is not None:
            shapes = {s.key: s.shape for s in names.serialized}
            named = renamed(state, {param: str(param) for param in state.params})
            return (
                in_groups(named, placed(named, sources), carry(named, sources, shapes, where)),
                None,
                sources,
            )
    called: Mapping[Param, str] = {param: str(param) for param in state.params}
    if names is not None or state.form == ID:
        found = _owners(state, wanted, where)
        if found.doubt is not None and found.doubt.by_another and wanted.old_model is not None:
            found = replace(found, doubt=replace(found.doubt, hint=wanted.old_model))
        called = found.settled(where).names
        known = found if state.form == ID else None
    if names is None and in_file(state)[0] is not None:
        called = _unwrapped(called, wanted)
    return renamed(state, called), known, {name: Ref(str(param)) for param, name in called.items()}


def _unwrapped(names: Mapping[Param, str], wanted: OptimizerRequest) -> dict[Param, str]:
    """Return the names without the wrappers that the remap removes from the model's keys, or
    replaces.
    """
    if (
        wanted.ruled is not None
        or wanted.model is None
        or not wanted.model.renames(list(names.values()))
    ):
        return dict(names)
    paths = wrappers.recognise(wanted.model.section.keys)
    return {param: strip(name, paths) for param, name in names.items()}


def _rules_first(state: OptimizerState, wanted: OptimizerRequest, where: str) -> OptimizerRequest:
    """Let the named model load the state, if the file has its names only after the rules."""
    listed, names = in_file(state)[0], wanted.names
    if listed is None or names is None or wanted.to_names is not None or not wanted.rules:
        return wanted
    if not in_model(listed.values(), names)[1]:
        return wanted
    after = replace(wanted, names=None, to_names=names)
    own = renamed(state, listed)
    made, _ = _sources(own, after, wanted.keys or state.form, where)
    return wanted if in_model(made, names)[1] else after


def _of_new_model(
    sources: Mapping[str, Expression], names: Names, where: str
) -> dict[str, Expression]:
    """Return `sources` under the canonical names of the model that will load them, if it has these
    names.
    """
    canonical, problems = in_model(sources, names)
    if not canonical:
        raise Refused(
            f"{where}: none of its parameters has a name of {names.model}",
            hint="--rule 'FROM => TO' says which parameter is which",
            problems=problems,
        )
    return {canonical[name]: source for name, source in sources.items() if name in canonical}


def _as_the_keys(
    state: OptimizerState, moved: OptimizerState, wanted: OptimizerRequest, to: str, where: str
) -> dict[Param, str]:
    """Return the parameters whose keys in the model have wrappers, with these keys as their names.

    Raise `Refused` if the names would have no wrappers next to a model whose keys get some.
    """
    keys = set(wanted.model_keys)
    evidence = wrappers.infer(wanted.model_keys)
    prefix = f"{evidence.root[-1]}." if evidence.root else ""
    by_name = {strip(key, evidence.paths): key for key in wanted.model_keys}
    found = {
        param: copied(by_name.get(str(param), "")) or prefix + str(param)
        for param in moved.params
        if param not in keys and not str(param).startswith(prefix or ".")
    }
    found = {param: name for param, name in found.items() if name != param}
    if to == ID:
        return found if all(group.param_names for group in moved.nonempty_groups) else {}
    was = set() if wanted.model is None else set(wanted.model.section.keys)
    # as torch names them next to a wrapped model
    apart = state.form != ID and was.isdisjoint(map(str, state.params))
    if found and not apart:
        param, name = next(iter(found.items()))
        raise Refused(
            f"{where}: the names of its parameters have no wrappers, and the model's keys would"
            " have some",
            hint="--to serialized takes wrappers out of the keys, --optimizer-keys id the names"
            " out of the optimizer",
            problems=[Problem(f"the key is {name}", str(param))],
        )
    return {}


def _owners(state: OptimizerState, wanted: OptimizerRequest, where: str) -> ParamMap:
    """Identify the parameters of the ids; with rules only, the file's own keys count too if they
    can be these.
    """
    state_dicts = wanted.state_dicts or ()
    by_keys = (
        own_names(state, state_dicts) if wanted.names is None and wanted.ruled is not None else None
    )
    if by_keys is not None:
        return by_keys
    if wanted.names is not None and wanted.ruled is not None:
        params = set(Parameters(wanted.names).shapes)
        # it may be the model after the rules
        if saved_order(state_dicts, wanted.names, params) is None:
            state_dicts = (wanted.ruled.after,)
    return owners(state, wanted.names, where, state_dicts)


def _by_rules_file(
    named: OptimizerState, wanted: OptimizerRequest, to: str, where: str
) -> dict[str, Expression] | None:
    """Return the parameters after the rules; None without rules, or if no parameter is a tensor of
    the model.
    """
    if wanted.ruled is None:
        return None
    ways = [identity(named.params)]
    if wanted.names is not None:
        ways.append(to_serialized(wanted.names, named.params))
    known = [len(wanted.ruled.shapes(list(way))) for way in ways]
    found = wanted.ruled.sources(ways[known.index(max(known))], where)
    if found is None and not wanted.ruled.keeps_places and len(wanted.state_dicts or ()) == 1:
        raise Refused(
            f"{where}: none of its parameters is a tensor of the model, so that nothing follows"
            " the rules",
            hint=AFRESH,
            problems=[Problem("no tensor of the model", str(param)) for param in named.params],
        )
    kept = {ref for source in (found or {}).values() for ref in ex.refs(source)}
    keeps = (
        found is not None
        and len(found) == len(kept) == len(named.params)
        and all(map(is_whole, found.values()))
    )
    if found is not None and to == ID and wanted.to_names is None and not keeps:
        if wanted.ruled is wanted.narrowed:
            raise Refused(
                f"{where}: parameters of the model are left out, and the optimizer still numbers"
                " them",
                hint=f"drop the optimizer too: --drop {where}; or pass --optimizer-keys fqn, to"
                " keep the state of the "
                "other parameters under their names",
                problems=[
                    Problem("left out of the model", str(p))
                    for p in named.params
                    if str(p) not in kept
                ],
            )
        raise Refused(
            f"{where}: the rules make other parameters, and nothing says in which order the new"
            " model registers them",
            hint="pass --to-model NEW, the model that is to load it; or --optimizer-keys fqn,"
            " which names them",
        )
    return found


def _check_loads(moved: OptimizerState, old: Names | None, new: Names | None, where: str) -> None:
    """Raise `Refused` if the optimizer that will load the state cannot take a step with it."""
    target = new or old
    if new is not None:
        check(ParamMap(moved, {param: str(param) for param in moved.params}, "names"), new).settled(
            where
        )
    if target is None:
        return
    lacks = Counter(
        key.rpartition(".")[2]
        for key in lacking(moved, target.optimizer_groups, Parameters(target).first_step)
    )
    if lacks:
        own_class = class_of(moved) or "another optimizer"
        raise Refused(
            f"{where}: this is the state of {own_class}; {target.optimizer_class} loads it, and"
            " fails at the next step",
            hint=AFRESH,
            problems=[
                Problem("the optimizer needs it, and the file's state has none", name)
                for name in lacks
            ],
        )


def _sources(
    named: OptimizerState, wanted: OptimizerRequest, to: str, where: str
) -> tuple[dict[str, Expression], bool]:
    """Return the new parameters as expressions over the old ones, and whether they follow the keys
    of the model.
    """
    ruled = _by_rules_file(named, wanted, to, where)
    if ruled is not None:
        return ruled, True
    renamed = {str(param): by_rules(str(param), wanted.rules) for param in named.params}
    if wanted.to_names is not None and wanted.names is not None:
        return between(wanted.names, wanted.to_names, renamed), False
    if wanted.form == SERIALIZED and wanted.names is not None and to != ID:
        found = to_serialized(wanted.names, named.params)
    else:
        found = identity(named.params)
    made = {by_rules(name, wanted.rules): source for name, source in found.items()}
    if len(made) < len(found):
        raise Refused(
            "the rules give several parameters of the optimizer one name",
            hint="`--dry-run` shows the names",
        )
    return made, False


def by_rules(name: str, rules: Sequence[Renaming]) -> str:
    """Return the name after the first rule that matches it."""
    return next(
        (found for found in (rule.apply(name) for rule in rules) if found is not None), name
    )


def _notes(
    where: str,
    state: OptimizerState,
    moved: OptimizerState,
    to: str,
    new: Sequence[str],
    dropped: Sequence[str],
) -> tuple[str, ...]:
    notes = []
    if len(moved.groups) != len(state.groups):
        notes.append(
            f"{where}: {plural(len(moved.groups), 'param group')}, not {len(state.groups)}: a"
            " learning-rate scheduler "
            "that was saved has one value for each of the old ones"
        )
    old_options = {name for group in state.groups for name in group.options}
    options = dict.fromkeys(name for group in moved.groups for name in group.options)
    added = [name for name in options if name not in old_options]
    if added and old_options:
        notes.append(
            f"{where}: added to the param groups, as the new optimizer has them: {some(added)}"
        )
    if new:
        notes.append(f"{where}: new, and without state: {some(new)}")
    if dropped:
        notes.append(
            f"{where}: left out, the state of {plural(len(dropped), 'parameter')}: {some(dropped)}"
        )
    if state.form == FLAT and to != FLAT and not any(group.param_names for group in state.groups):
        notes.append(
            f"{where}: the flattened form does not say which param groups there were; parameters"
            " with the same "
            f"hyperparameters are one group now ({len(state.groups)} in all)"
        )
    return tuple(notes)


@dataclass(frozen=True)
class RuleEffect:
    """The model's section before a change (by rules, or all of it), and the plan of the change."""

    section: Section
    plan: Plan

    @cached_property
    def keeps_places(self) -> bool:
        """Whether every tensor stays one, of the same elements in the same order: ids stay what
        they are.
        """
        gone = [one for one in self.plan.dropped if not _is_counter(one.key)]
        return not gone and all(
            is_whole(one.source) for one in self.plan.outputs if not _is_counter(one.key)
        )

    @property
    def keeps_rest(self) -> bool:
        """Whether every tensor that is not left out stays one, of the same elements in the same
        order.
        """
        return all(
            is_whole(output.source) for output in self.plan.outputs if not _is_counter(output.key)
        )

    def renames(self, names: Sequence[str]) -> bool:
        """Return True if one of the names is a tensor whose key changes."""
        keys = set(self._keys(names).values())
        return any(
            ref in keys and ref != output.key
            for output in self.plan.outputs
            for ref in ex.refs(output.source)
        )

    def loses(self, names: Sequence[str]) -> bool:
        """Return True if one of the names is a tensor that is left out."""
        first = self.section.aliases()
        kept = {
            first.get(ref, ref) for output in self.plan.outputs for ref in ex.refs(output.source)
        }
        return any(first.get(key, key) not in kept for key in self._keys(names).values())

    @cached_property
    def after(self) -> Section:
        entries = self.section.by_key()
        outputs = [
            (output.key, entries[ref])
            for output in self.plan.outputs
            if is_whole(output.source)
            for ref in ex.refs(output.source)
        ]
        tensors = (
            replace(entry, key=key) for key, entry in outputs if isinstance(entry, TensorEntry)
        )
        return replace(self.section, tensors=tuple(tensors))

    @cached_property
    def called(self) -> dict[str, str]:
        """Old name -> new name of each tensor that stays complete, without the segments of
        wrappers.
        """
        pairs = [
            (key, output.key) for output in self.plan.outputs for key in ex.refs(output.source)
        ]
        before, after = (
            (wrappers.canonical_keys(keys) for keys in zip(*pairs)) if pairs else ({}, {})
        )
        return {before[key]: after[new] for key, new in pairs}

    def shapes(self, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        entries = self.section.by_key()
        found = ((name, entries.get(key)) for name, key in self._keys(names).items())
        return {name: entry.shape for name, entry in found if isinstance(entry, TensorEntry)}

    def sources(self, found: Mapping[str, Expression], where: str) -> dict[str, Expression] | None:
        """The parameters after the rules, from those before them; None where none is a tensor of
        this model.

        Raise `Refused`, all problems at once, if only some are.
        """
        keys = self._keys(list(found))
        if not keys:
            return None
        problems = [
            Problem("is not a tensor of the model that the rules change", name)
            for name in found
            if name not in keys
        ]
        first = self.section.aliases()
        names = {first.get(key, key): name for name, key in keys.items()}
        literal = all(name == key for name, key in keys.items())
        paths = (
            () if literal else wrappers.infer([output.key for output in self.plan.outputs]).paths
        )
        known = {
            key: found[names[first.get(key, key)]]
            for key in self.section.by_key()
            if first.get(key, key) in names
        }
        made: dict[Expression, str] = {}
        for output in self.plan.outputs:
            read = list(dict.fromkeys(first.get(key, key) for key in ex.refs(output.source)))
            others = [key for key in read if key not in names]
            if others and len(others) < len(read):
                problems.append(
                    Problem(
                        f"is made of {', '.join(others)} too, which the optimizer has not",
                        output.key,
                    )
                )
            elif read and not others:
                source = ex.substitute(output.source, known.__getitem__)
                made.setdefault(source, copied(strip(output.key, paths)))
        if problems:
            raise Refused(
                f"{where}: the rules do not fit its parameters",
                hint="--model MODEL says which key each parameter has",
                problems=problems,
            )
        return {name: source for source, name in made.items()}

    def _keys(self, names: Sequence[str]) -> dict[str, str]:
        """Which of the names are which keys: as they are, or without the wrappers' segments of the
        keys.
        """
        keys = list(self.section.by_key())
        paths = wrappers.infer(keys).paths
        stripped = {strip(key, paths): key for key in reversed(keys)}
        there = set(keys)
        return {
            name: name if name in there else stripped[name]
            for name in names
            if name in there or name in stripped
        }


def copied(text: str) -> str:
    """Return an equal string that is a new object: pickle would write a shared one as a
    reference.
    """
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


def _is_counter(key: str) -> bool:
    """Whether it is the counter of an AveragedModel, which wrappers bring and take along."""
    return key.rpartition(".")[2] == wrappers.COUNTER


def is_whole(source: Expression) -> bool:
    """Whether it is one tensor as it is, but perhaps for a cast."""
    return isinstance(ex.without_cast(source), Ref)
