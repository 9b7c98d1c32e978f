"""A remap on the index: what to drop, then the steps of the request folded into one plan, which is carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import chain as in_turn

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.edits.remap.adapter import of_adapter
from ckpttool.edits.remap.by_model import recorded
from ckpttool.edits.remap.draft import Draft, Step, carried
from ckpttool.edits.remap.drop import check_whole, drop, without
from ckpttool.edits.remap.optimizer import OptimizerRemap, OptimizerRequest, by_rules, remap_optimizers
from ckpttool.edits.remap.renaming import ByRuleSteps, Prefixed
from ckpttool.edits.remap.request import RemapRequest
from ckpttool.edits.remap.result import Remap
from ckpttool.edits.remap.ruled import Ruled
from ckpttool.edits.rules.patterns import Renaming
from ckpttool.errors import CkptError, Problem, Refused
from ckpttool.evaluate.apply import NO_CODE, Runner, apply
from ckpttool.keys import dotted
from ckpttool.names import SERIALIZED
from ckpttool.naming.match import match
from ckpttool.naming.model_form import Form
from ckpttool.naming.name_tables import NameTables
from ckpttool.naming.optimizers import forms
from ckpttool.naming.optimizers.moves import carried_out
from ckpttool.naming.optimizers.saved_order import in_order_of
from ckpttool.naming.wrappers import chain
from ckpttool.naming.wrappers.chain import Chain, Evidence
from ckpttool.naming.wrappers.table import strip
from ckpttool.operands.sections import left_as_they_are, of_one_model
from ckpttool.optimizer_state import ID
from ckpttool.plan import Dropped, OptimizerMove, Output, Plan
from ckpttool.words import shell

_NOTHING = RemapRequest()


def remap(source: Checkpoint, asked: RemapRequest = _NOTHING, drops: Sequence[str] = ()) -> Remap:
    """Makes and carries out the plan. Raises `Refused`, all problems at once, where it would lose, collide or guess."""
    lightning = chain.is_lightning(source)  # also if the key that says so is left out
    source, dropped = drop(source, drops) if drops else (source, [])
    if not asked.changes:
        if asked.sections is not None:
            of_one_model(source, asked.sections)  # raises where one of them is none
        return Remap(source, replace(carried(source.sections), dropped=tuple(dropped)), model=_as_it_is(source))
    sections = of_one_model(source, asked.sections, asked.names)
    drafts = _drafts(sections, asked, lightning)
    made = Plan(
        tuple(output for draft in drafts for output in draft.plan.outputs),
        tuple(gone for draft in drafts for gone in draft.plan.dropped),
        tuple(module for draft in drafts for module in draft.plan.modules),
        tuple(run for draft in drafts for run in draft.plan.runs),
    )
    runners = {way: runner for draft in drafts for way, runner in draft.runners.items()}
    paths = [section.path for section in sections]
    result = reduce(lambda result, path: _recorded(result, asked, path), paths, apply(made, source, runners))
    touched = {gone.section for gone in dropped}.difference(paths)
    rest = carried(other for other in source.sections if other.path in touched)
    plan = replace(made, outputs=(*made.outputs, *rest.outputs), dropped=(*made.dropped, *dropped))
    notes = (*_notes(drafts), *left_as_they_are(source, sections), *_not_narrowed(source, asked))
    form = None if asked.to is None else str(asked.to)
    together = tuple(paths) if len(paths) > 1 else ()
    missing = [
        dotted(draft.section.path, key)
        for draft in drafts
        for key in _not_left_out(draft, asked, [gone.key for gone in dropped if gone.section == draft.section.path])
    ]
    model = None if asked.select is not None else Ruled(drafts[0].section, drafts[0].plan)
    ruled = drafts[0].ruled
    done = Remap(result, plan, drafts[0].form, form, notes, ruled=ruled, model=model, sections=together)
    return replace(done, missing=tuple(missing))


def _not_left_out(draft: Draft, asked: RemapRequest, dropped: Sequence[str]) -> list[str]:
    """What is missing of a section, without the keys that the user leaves out by --drop or --select."""
    names = asked.to_names or asked.names
    if names is None or not draft.missing:
        return []
    tables = NameTables(names)
    own = tables.serialized_names if asked.model_form.names == SERIALIZED else tables.runtime_names
    left_out = {*dropped, *match(dropped, own).names.values(), *match(dropped, tables.serialized_names).names.values()}
    below = "" if asked.select is None else f"{asked.select}."
    return [key for key in draft.missing if key not in left_out and key.startswith(below)]


def _as_it_is(source: Checkpoint) -> Ruled | None:
    """The model of a file that keeps it; None if it is not known which of several it is."""
    if not source.state_dicts:
        return None
    try:
        section = of_one_model(source)[0]
    except CkptError:
        return None
    return Ruled(section, carried([section]))


def _drafts(sections: Sequence[Section], asked: RemapRequest, lightning: bool) -> list[Draft]:
    """What becomes of each section. Raises `Refused`; what is wrong with a further section is said under its path."""
    made: list[Draft] = []
    for section in sections:
        try:
            begin = _draft(section, asked.source_form, lightning)
            steps = of_adapter(asked, section)
            own = steps if not made or asked.names is not None else _as_for(made[0], begin, steps)
            made.append(reduce(lambda draft, step: step.apply(draft), own, begin))
        except Refused as error:
            if len(sections) == 1:
                raise
            raise Refused(
                f"{section.title}: {error.message}",
                hint=f"{error.hint}; --sections '{sections[0].path}' changes that one alone",
                problems=error.problems,
            ) from None
    return made


def _as_for(first: Draft, further: Draft, steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps for a further section; rules are written for the keys of the first, which may differ by one prefix."""
    keys = {name: key for key, name in first.canonical.items()}
    pairs = [(keys[name], key) for key, name in further.canonical.items() if name in keys]
    found = {
        (key[: len(key) - len(shared)], other[: len(other) - len(shared)])
        for key, other in pairs
        for shared in [key if len(key) < len(other) else other]
        if key.endswith(shared) and other.endswith(shared)
    }
    if len(found) != 1 or not all(key.endswith(other) or other.endswith(key) for key, other in pairs):
        return tuple(steps)
    ((shown, own),) = found
    return tuple(Prefixed(step, own, shown) if isinstance(step, ByRuleSteps) else step for step in steps)


def _notes(drafts: Sequence[Draft]) -> list[str]:
    """The notes on all sections; on a further one those that it has alone."""
    first = drafts[0].notes
    return [*first, *(f"{d.section.path}: {note}" for d in drafts[1:] for note in d.notes if note not in first)]


def _draft(section: Section, form: Form | None, lightning: bool) -> Draft:
    """Where a remap begins: every key keeps its name. Wrappers are where the user says so, or else where keys show."""
    keys = section.keys
    if form is None:
        wrappers = chain.infer(keys, lightning=lightning)
    elif isinstance(form, Chain):
        wrappers = chain.declared(form, keys)
    else:  # these are names without wrappers
        wrappers = Evidence((), (), frozenset())
    paths = wrappers.paths
    canonical = {key: strip(key, paths) for key in keys} if paths else dict(zip(keys, keys))
    return Draft(section, carried([section]), wrappers, canonical, wrappers.form)


def _recorded(result: Checkpoint, asked: RemapRequest, path: str) -> Checkpoint:
    if asked.names is None or asked.to_names is not None or asked.select is not None or isinstance(asked.to, Chain):
        return result
    tables = NameTables(asked.names)
    return recorded(tables, result, path, asked.form_by_model(tables).names)


def _not_narrowed(source: Checkpoint, asked: RemapRequest) -> list[str]:
    if asked.select is None:
        return []
    paths = (section.path for section in source.optimizers)
    return [f"{path} still holds the state of all parameters" for path in paths]


def with_optimizers(done: Remap, wanted: OptimizerRequest) -> Remap:
    """`done` with the optimizers of its result as `wanted`, and its plan with what becomes of them.

    A model beside ids gets the order of the model that these are now those of: else its keys would speak against them.
    """
    model = done.model
    ruled = done.ruled
    if ruled is not None and wanted.names is None and model is not None:
        ruled = model  # the file's names are all that there is: they go the way of its keys
    keys = () if model is None else done.result.section(model.section.path).keys
    wanted = replace(wanted, ruled=ruled, model=model, keys_beside=keys)
    result, optimizers = remap_optimizers(done.result, wanted)
    if wanted.rules and (ruled is None or ruled.renames(ruled.section.keys)):
        done = replace(done, notes=(*done.notes, *_left_in_order(result, optimizers, wanted)))
    if not optimizers:
        return done
    keeps = ruled is None or ruled.keeps_places
    loads = next((one.loaded_by for one in optimizers if one.loaded_by is not None), None)
    target = loads or (wanted.names if keeps else None)
    if target is not None and any(one.to == ID for one in optimizers):
        called = None if loads is not None else _called(done.ruled, wanted.rules)
        ordered = (in_order_of(one, target, called) if one.kind == "state_dict" else one for one in result.sections)
        result = replace(result, sections=tuple(ordered))
    notes = [note for one in optimizers for note in one.notes]
    plan = _with_moves(done.plan, result, [one.move for one in optimizers if one.move is not None])
    return replace(done, result=result, plan=plan, optimizers=optimizers, notes=(*done.notes, *notes))


def _left_in_order(result: Checkpoint, optimizers: Sequence[OptimizerRemap], wanted: OptimizerRequest) -> Iterator[str]:
    """A note on each optimizer with ids, which rules do not bring into the order of the model that they lead to."""
    known = {one.section for one in optimizers if one.loaded_by is not None}
    for section in result.optimizers:
        state = forms.read(section)
        if state.form == ID and section.path not in known and not (state.is_stateless and len(state.groups) < 2):
            ask = shell("ckpttool", "diff", "--model", "NEW", "--optimizer", "O", wanted.output or "OUT")
            which = "" if section.title == "optimizer" else f"{section.title}: "
            yield f"{which}optimizer ids keep the order of the model that saved them; check with {ask}"


def _called(ruled: Ruled | None, rules: Sequence[Renaming]) -> Callable[[str], str] | None:
    """What names have become; None where they are what they were."""
    if ruled is None:
        return partial(by_rules, rules=rules) if rules else None
    return lambda name: ruled.called.get(name, name)


def _with_moves(plan: Plan, result: Checkpoint, moves: Sequence[OptimizerMove]) -> Plan:
    """The plan with what becomes of optimizers, and its outputs in the order of the result's keys.

    Of what the optimizers hold only what is left out of them stands among the outputs too.
    """
    dropped = {gone.section for gone in plan.dropped}
    changed = {move.section for move in moves} - dropped
    outputs: dict[str, list[Output]] = {}
    for output in plan.outputs:
        if output.section not in changed:
            outputs.setdefault(output.section, []).append(output)
    for section in result.sections:
        if section.kind != "optimizer" and section.path in outputs:
            outputs[section.path] = _in_order(outputs[section.path], section.keys)
    return replace(plan, outputs=tuple(in_turn.from_iterable(outputs.values())), optimizers=tuple(moves))


def _in_order(outputs: list[Output], keys: Sequence[str]) -> list[Output]:
    rank = {key: place for place, key in enumerate(keys)}
    return sorted(outputs, key=lambda output: rank.get(output.key, 0))


def by_plan(source: Checkpoint, plan: Plan, runners: Mapping[str, Runner] = NO_CODE) -> Remap:
    """Carries out a plan that was saved; what it drops outside of state dicts are whole sections and other contents.

    `runners`, by way, are the models' code for its runs. Raises `Refused` where one of them is not there.
    """
    paths = {*source.others, *source.beside, *(section.path for section in source.sections)}
    paths.update(found.path for found in source.unreached)
    whole = [d for d in plan.dropped if not d.section and d.key in paths and not _holds(source, d)]
    rest = replace(plan, dropped=tuple(d for d in plan.dropped if d not in whole))
    left = without(source, [d.key for d in whole])
    moves = {move.section: move for move in plan.optimizers}
    check_whole(left, [one for one in rest.dropped if one.section not in moves])
    made = apply(rest, left, runners)
    there = {section.path for section in made.optimizers}
    if not moves.keys() <= there:
        raise Refused(
            f"the plan changes optimizers that {source.source} has not",
            hint=f"`ckpttool inspect {source.source}` lists its sections",
            problems=[Problem("no optimizer", path or "(root)") for path in moves if path not in there],
        )
    sections = (carried_out(moves[s.path], s) if s.path in moves else s for s in made.sections)
    return Remap(replace(made, sections=tuple(sections)), plan)


def _holds(source: Checkpoint, dropped: Dropped) -> bool:
    return any(section.path == dropped.section and dropped.key in section.by_key() for section in source.sections)
