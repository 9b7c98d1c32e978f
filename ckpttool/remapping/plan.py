"""Plan a remap on the index: what to drop, then each step of the request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain as in_turn
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import BY_CODE, Ref
from ckpttool.core.names import RUNTIME, SERIALIZED
from ckpttool.core.optimizer_state import FORMS, GROUPS, ID, STATE
from ckpttool.core.plan import PLAN, Dropped, OptimizerMove, Output, Plan, compose
from ckpttool.core.schema import (
    COUNT,
    TEXT,
    TEXTS,
    list_of,
    notes_as,
    nullable,
    one_of,
    record,
    row,
)
from ckpttool.core.text import Info, dotted, plural, shell
from ckpttool.core.values import dataclass, public
from ckpttool.evaluate.apply import apply
from ckpttool.io.undo import Written
from ckpttool.kinds.adapters import adapter_of
from ckpttool.kinds.packed import unpacked
from ckpttool.kinds.quantized import problems_of_parts, quantized_weights
from ckpttool.naming import wrappers as naming_wrappers
from ckpttool.naming.convert import Form, check_versions, read
from ckpttool.naming.match import match
from ckpttool.naming.wrappers import Chain
from ckpttool.operands.model import LOAD_HOOK, ModelOperand, left_as_they_are, of_one_model
from ckpttool.optimizers import forms
from ckpttool.optimizers.identify import in_order_of
from ckpttool.remapping.adapter import apply_rules_of_base, to_other_base
from ckpttool.remapping.companions import COMPANIONS, Companions
from ckpttool.remapping.optimizer import (
    OptimizerRemap,
    OptimizerRequest,
    RuleEffect,
    by_rules,
    remap_optimizers,
)
from ckpttool.remapping.steps import (
    Draft,
    Request,
    apply_rules,
    apply_rules_like_first,
    carried,
    new_draft,
    notes_on_like,
    recorded,
    rewrap,
    select,
    take_names,
    to_model_form,
    to_other_model,
    unwrap,
    with_counters,
    without_peft,
    without_pruning,
)
from ckpttool.remapping.write import COST, UNDO, VERIFIED, Cost, Undo, Verified
from ckpttool.ruleset.patterns import Renaming, names_entry


@public
@dataclass(frozen=True, slots=True)
class Remap:
    """The result of a remap. `result` is the checkpoint to write.

    `source_form` and `form` are the forms that the keys were in and are in, as words, or None.
    `ruled` is what the rules did to the model, `model` what the whole remap did to it, unless
    `--select` narrows it. `narrowed` is the same if tensors of the model are left out. `sections`
    are the state dicts that were changed together, if there are several. `written` says how a file
    named by --in-place was written, or would be, and `undo` how that is taken back, `verified` how
    the output is known to be right, `cost` what a `dry_run` found it to take. `companions` says
    what became of the other files of a folder. `source` and `output` are the operands CKPT and OUT.
    `format` is the title of the output's format. `changes_content` is False if the result has the
    names, values and order of the source: only its format may differ. `loads_into` is the model
    that `fix` wrote the output for. `missing` are the keys of the model, below the paths of their
    sections, that the result lacks.
    """

    result: Checkpoint
    plan: Plan
    source_form: str | None = None
    form: str | None = None
    notes: tuple[str, ...] = ()
    optimizers: tuple[OptimizerRemap, ...] = ()
    ruled: RuleEffect | None = None
    model: RuleEffect | None = None
    narrowed: RuleEffect | None = None
    sections: tuple[str, ...] = ()
    written: Written | None = None
    undo: Undo | None = None
    verified: Verified | None = None
    cost: Cost | None = None
    companions: Companions | None = None
    source: str = ""
    output: str = ""
    dry_run: bool = False
    changes_content: bool = True
    missing: tuple[str, ...] = ()
    format: str = ""
    loads_into: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """How many outputs are renamed, transformed and unchanged."""
        renamed = sum(
            isinstance(o.source, Ref) and o.source.key != o.key for o in self.plan.outputs
        )
        transformed = len(self.plan.computed)
        return dict(
            zip(_COUNTED, (renamed, transformed, len(self.plan.outputs) - renamed - transformed))
        )

    @property
    def dropped(self) -> list[str]:
        """The keys that are left out, below the paths of their sections."""
        return [dotted(gone.section, gone.key) for gone in self.plan.dropped]

    def to_json(self) -> dict[str, Any]:
        """The `remap` object of the contract."""
        return dict(REMAP.write(self))


def _together(done: Remap) -> tuple[object, ...] | None:
    if not done.optimizers:
        return None
    first = done.optimizers[0]
    return first.was, first.to, sum(one.params for one in done.optimizers), done.optimizers


_COUNTED = ("renamed", "transformed", "unchanged")
_FORM = one_of(*FORMS)
_OPTIMIZERS = list_of(
    record(
        OptimizerRemap,
        {
            "section": TEXT,
            "from": _FORM,
            "to": _FORM,
            "params": COUNT,
            "evidence": nullable(TEXT),
            "new": TEXTS,
            "dropped": TEXTS,
        },
        called={"from": "was"},
    )
)
_WRITTEN = record(Written, {"bytes": COUNT}, called={"bytes": "nbytes"})
REMAP = record(
    Remap,
    {
        **dict.fromkeys(("source", "output"), TEXT),
        **dict.fromkeys(("from", "to"), nullable(TEXT)),
        **dict.fromkeys(_COUNTED, COUNT),
        **dict.fromkeys(("dropped", "missing", "sections"), TEXTS),
        "by_code": list_of(row({"way": one_of(*BY_CODE), "model": TEXT, "keys": TEXTS})),
        "optimizer": nullable(
            row({"from": _FORM, "to": _FORM, "params": COUNT, "sections": _OPTIMIZERS})
        ),
        "notes": notes_as("remap"),
    },
    {
        "written": _WRITTEN,
        "undo": UNDO,
        "verified": VERIFIED,
        "cost": COST,
        "companions": COMPANIONS,
        "plan": PLAN,
    },
    called={
        "from": "source_form",
        "to": "form",
        "renamed": lambda done: done.counts["renamed"],
        "transformed": lambda done: done.counts["transformed"],
        "unchanged": lambda done: done.counts["unchanged"],
        "by_code": lambda done: [(run.way, run.model, keys) for run, keys in done.plan.by_code],
        "optimizer": _together,
        "plan": lambda done: done.plan if done.dry_run else None,
    },
    title="ckpttool.remap/1",
)


_STATE = (f"{STATE}.", f"{GROUPS}.")


def drop(checkpoint: Checkpoint, patterns: Sequence[str]) -> tuple[Checkpoint, list[Dropped]]:
    """Return the checkpoint without the entries, sections and other contents that a pattern names,
    and a list of these.

    A pattern is matched with the key, and with the dotted way from the file's root. Raise `Refused`
    for a pattern that names nothing, since it was meant to name something, and as `check_whole`
    does.
    """
    dropped: list[Dropped] = []
    idle = set(patterns)

    def hit(section: str, key: str) -> bool:
        used = [text for text in patterns if names_entry(text, section, key)]
        idle.difference_update(used)
        if used:
            dropped.append(Dropped(section, key, f"--drop {used[0]}"))
        return bool(used)

    sections = []
    for section in checkpoint.sections:
        if section.path and hit("", section.path):
            continue
        tensors = tuple(entry for entry in section.tensors if not hit(section.path, entry.key))
        extras = tuple(entry for entry in section.extras if not hit(section.path, entry.key))
        rest = replace(section, tensors=tensors, extras=extras)
        # an optimizer without state has its hyperparameters still
        if rest.entries or section.kind != "other":
            sections.append(rest)
    left = _kept(replace(checkpoint, sections=tuple(sections)), lambda path: not hit("", path))
    if idle:
        raise Refused(
            f"{len(idle)} of {len(patterns)} --drop patterns match nothing",
            hint=f"`{checkpoint.inspect_call}` lists what is there",
            problems=[Problem("matches nothing", text) for text in patterns if text in idle],
        )
    check_whole(checkpoint, dropped)
    return left, dropped


def _kept(checkpoint: Checkpoint, keep: Callable[[str], bool]) -> Checkpoint:
    """Return the checkpoint with the contents outside of its sections to `keep`, by their paths."""
    return replace(
        checkpoint,
        others=tuple(filter(keep, checkpoint.others)),
        unreached=tuple(found for found in checkpoint.unreached if keep(found.path)),
        other_files=tuple(filter(keep, checkpoint.other_files)),
    )


def check_whole(checkpoint: Checkpoint, dropped: Collection[Dropped]) -> None:
    """Raise `Refused` if the dropped keys are a part of an optimizer's state, or of a quantized
    weight.

    torch may load such a state and start again for some parameters. Entries outside of ``state``
    and ``param_groups`` may go.
    """
    gone: dict[str, set[str]] = {}
    for one in dropped:
        gone.setdefault(one.section, set()).add(one.key)
    torn: dict[Section, list[str]] = {}
    for section in checkpoint.optimizers:
        here = gone.get(section.path, ())
        keys = [
            entry.key
            for entry in section.entries
            if entry.key in here and entry.key.startswith(_STATE)
        ]
        if keys:
            torn[section] = keys
    if torn:
        titles = ", ".join(section.title for section in torn)
        counts = (
            f"{sum(map(len, torn.values()))} of"
            f" {plural(sum(len(one.entries) for one in torn), 'entry')} of {titles}"
        )
        hint = "drop no key of the optimizer"
        if all(section.path for section in torn):
            options = shell(*(word for section in torn for word in ("--drop", section.path)))
            hint = f"remove all of the optimizer state: {options}; or {hint}"
        raise Refused(
            f"--drop would remove a part of the optimizer state, {counts}: torch may load the"
            " rest, and start again",
            hint=hint,
            problems=[
                Problem("would go", dotted(one.path, key))
                for one, keys in torn.items()
                for key in keys
            ],
        )
    apart: list[Problem] = []
    for section in checkpoint.state_dicts:
        here = gone.get(section.path, set())
        for weight in quantized_weights(section) if here else ():
            kept = [key for key in weight.keys if key not in here]
            if 0 < len(kept) < len(weight.keys):
                text = f"would go, and {', '.join(kept)} would stay"
                apart += [
                    Problem(text, dotted(section.path, key), "quantized")
                    for key in weight.keys
                    if key in here
                ]
    if apart:
        raise Refused(
            "--drop would remove a part of a quantized weight",
            hint="drop all of its entries, or none",
            problems=apart,
        )


def check_quantized(drafts: Sequence[Draft]) -> None:
    """Raise `Refused` if the plan of a section separates the parts of quantized weights, or casts
    them.
    """
    problems = [
        problem
        for draft in drafts
        for problem in problems_of_parts(draft.section, draft.plan.outputs)
    ]
    if problems:
        raise Refused(
            "the numbers of quantized weights mean nothing without their scales:"
            f" {plural(len(problems), 'problem')}",
            hint="rename all parts of a weight together ('FROM.{x*} => TO.{x*}'); to change the"
            " dtype, load the model "
            "with the library that quantized it, and save it dequantized",
            problems=problems,
        )


def remap(source: Checkpoint, request: Request) -> Remap:
    """Plan the remap and apply it on the index. Raise `Refused` if it would lose, collide or
    guess.
    """
    options = request.options
    lightning = naming_wrappers.is_lightning(source)  # also if the key that shows it is dropped
    before = source
    source, dropped = drop(source, options.drop) if options.drop else (source, [])
    if not request.changes:
        if options.sections is not None:
            of_one_model(source, options.sections)  # raises where one of them is none
        model = _as_it_is(source)
        plan = replace(carried(source.sections), dropped=tuple(dropped))
        return Remap(source, plan, model=model, narrowed=_narrowing(before, model, dropped))
    names = None if request.saved is None else request.saved.names()
    paths = [section.path for section in of_one_model(source, options.sections, names)]
    of_packed: list[Info] = []
    if options.form is not None or request.loads is not None:  # forms are of state dicts
        source, attributes, of_packed = unpacked(source, paths)
        dropped += attributes
    sections = [source.section(path) for path in paths]
    if request.saved is not None and source.optimizers:
        _check_pruned_state(source, sections, request.saved)
    drafts = _drafts(source, sections, request, lightning)
    check_quantized(drafts)
    made = Plan(
        tuple(output for draft in drafts for output in draft.plan.outputs),
        tuple(gone for draft in drafts for gone in draft.plan.dropped),
        tuple(module for draft in drafts for module in draft.plan.modules),
        tuple(run for draft in drafts for run in draft.plan.runs),
    )
    runners = {way: runner for draft in drafts for way, runner in draft.runners.items()}
    result = apply(made, source, runners)
    narrowed_or_moved = (
        request.loads is not None or options.select is not None or isinstance(options.form, Chain)
    )
    if request.saved is not None and not narrowed_or_moved:
        for path in paths:
            result = recorded(request.saved.tables, result, path, request.form_by_model.names)
    touched = {gone.section for gone in dropped}.difference(paths)
    rest = carried(other for other in source.sections if other.path in touched)
    plan = replace(made, outputs=(*made.outputs, *rest.outputs), dropped=(*made.dropped, *dropped))
    shown = drafts[0].notes
    others = [
        f"{d.section.path}: {note}" for d in drafts[1:] for note in d.notes if note not in shown
    ]
    notes = (*of_packed, *shown, *others, *left_as_they_are(source, sections))
    form = None if options.form is None else str(options.form)
    together = tuple(paths) if len(paths) > 1 else ()
    missing = [
        dotted(draft.section.path, key)
        for draft in drafts
        for key in _not_left_out(
            draft, request, [gone.key for gone in dropped if gone.section == draft.section.path]
        )
    ]
    whole = RuleEffect(drafts[0].section, drafts[0].plan)
    narrowed = _narrowing(before, whole, dropped)
    model, narrowed = (whole, narrowed) if options.select is None else (None, narrowed or whole)
    done = Remap(
        result,
        plan,
        drafts[0].form,
        form,
        notes,
        ruled=drafts[0].ruled,
        model=model,
        narrowed=narrowed,
    )
    return replace(done, sections=together, missing=tuple(missing))


def _check_pruned_state(
    source: Checkpoint, sections: Sequence[Section], model: ModelOperand
) -> None:
    """Raise `Refused` if pruned weights would be computed next to optimizers, which have the state
    of their parts.

    The parts are also registered in another order than the weights.
    """
    pruned = [
        plan for section in sections if (plan := without_pruning(section, model.tables)) is not None
    ]
    if not pruned:
        return
    drops = shell(*(word for section in source.optimizers for word in ("--drop", section.path)))
    raise Refused(
        "the model in this file is pruned, and its optimizer state belongs to the weights before"
        " the masks",
        hint=f"leave it out: {drops}",
        problems=[
            Problem("computed from its mask", output.key)
            for plan in pruned
            for output in plan.computed
        ],
    )


def _not_left_out(draft: Draft, request: Request, dropped: Sequence[str]) -> list[str]:
    """Return the missing keys of a section, except keys that --drop or --select leaves out."""
    model = request.loads or request.saved
    if model is None or not draft.missing:
        return []
    tables = model.tables
    own = (
        tables.serialized_names if request.model_form.names == SERIALIZED else tables.runtime_names
    )
    left_out = {
        *dropped,
        *match(dropped, own).names.values(),
        *match(dropped, tables.serialized_names).names.values(),
    }
    below = "" if request.options.select is None else f"{request.options.select}."
    return [key for key in draft.missing if key not in left_out and key.startswith(below)]


def _as_it_is(source: Checkpoint) -> RuleEffect | None:
    if not source.state_dicts:
        return None
    try:
        section = of_one_model(source)[0]
    except CkptError:
        return None
    return RuleEffect(section, carried([section]))


def _narrowing(
    source: Checkpoint, effect: RuleEffect | None, dropped: Sequence[Dropped]
) -> RuleEffect | None:
    """Return `effect` with the tensors that `--drop` left out of `source`; None if no tensor is
    left out.
    """
    path = "" if effect is None else effect.section.path
    own = tuple(gone for gone in dropped if gone.section == path)
    if effect is None or not (own or effect.plan.dropped):
        return None
    return RuleEffect(
        source.section(path), replace(effect.plan, dropped=(*effect.plan.dropped, *own))
    )


def _drafts(
    source: Checkpoint, sections: Sequence[Section], request: Request, lightning: bool
) -> list[Draft]:
    """Return the draft of each section. A problem of a further section is reported under its
    path.
    """
    drafts: list[Draft] = []
    for section in sections:
        try:
            drafts.append(_draft(section, request, lightning, drafts[0] if drafts else None))
        except Refused as error:
            if not source.in_memory and len(sections) == 1:
                raise
            message, hint = error.message, error.hint
            if source.in_memory:
                hint = hint.replace("ckpttool inspect CKPT", source.inspect_call)
            if len(sections) > 1:
                message = f"{section.title}: {message}"
                hint = f"{hint}; --sections '{sections[0].path}' changes that one alone"
            raise Refused(message, hint=hint, problems=error.problems) from None
    return drafts


def _draft(section: Section, request: Request, lightning: bool, first: Draft | None) -> Draft:
    """Go through the models' names, then the submodule, the wrappers and the rules; `first` is
    another section's.
    """
    options, form = request.options, request.options.form
    draft = start = new_draft(section, options.source_form, lightning)
    adapter = adapter_of(section.keys)
    is_adapter = adapter is not None
    if adapter is not None and adapter.alone and not _is_for_peft(form):
        draft = start = without_peft(draft)
    saved, loads = request.saved, request.loads
    if saved is not None:
        if is_adapter and loads is not None:
            draft = to_other_base(draft, saved.tables, loads.tables, loads.code)
        else:
            counters = naming_wrappers.counters(section.keys)
            rest = replace(
                section,
                tensors=tuple(entry for entry in section.tensors if entry.key not in counters),
            )
            pruned = without_pruning(rest, saved.tables)
            by_loading = (
                saved.by_loading(rest) if options.source_form is None and pruned is None else None
            )
            if pruned is not None:
                whole = apply(pruned, Checkpoint.of(rest)).section(section.path)
                draft = to_model_form(replace(draft, section=whole), request, saved)
                plan = compose(pruned, draft.plan)
                draft = replace(draft, section=section, plan=plan, counters=tuple(counters))
            elif by_loading is None:
                draft = to_model_form(draft, request, saved)
            else:
                loaded = apply(by_loading, Checkpoint.of(rest)).section(section.path)
                if request.form_by_model.names == SERIALIZED:
                    reading = replace(read(saved.tables, loaded, RUNTIME), form=SERIALIZED)
                    # the versions of the file would be in the output
                    check_versions(saved.names(), loaded, reading)
                draft = to_model_form(
                    replace(draft, section=replace(loaded, form=RUNTIME)), request, saved
                )
                plan = compose(by_loading, draft.plan)
                draft = replace(
                    draft, section=section, plan=plan, form=LOAD_HOOK, counters=tuple(counters)
                )
            if loads is not None:
                draft = to_other_model(draft, request, loads)
            draft = with_counters(draft, keep=request.like is not None or isinstance(form, Chain))
    if options.select is not None:
        draft = select(draft, options.select, by_model=saved is not None)
    if request.like is not None:
        draft = take_names(draft, request.like)
    elif isinstance(form, Chain):
        draft = rewrap(draft, form)
    elif form is not None and saved is None:
        draft = rewrap(draft, Chain(()))
    if request.rule_steps and is_adapter and (saved is None or loads is None):
        draft = apply_rules_of_base(draft, request.rule_steps)
    elif request.rule_steps and first is not None and saved is None:
        draft = apply_rules_like_first(draft, request.rule_steps, first, start)
    elif request.rule_steps:
        draft = apply_rules(draft, request.rule_steps, is_new=draft is start)
    if request.like is not None:
        draft = replace(draft, notes=(*draft.notes, *notes_on_like(draft, request.like)))
    return draft if request.unwrapped is None else unwrap(draft, request.unwrapped.tables)


def _is_for_peft(form: Form | None) -> bool:
    return isinstance(form, Chain) and "peft" in form.words


def with_optimizers(done: Remap, wanted: OptimizerRequest) -> Remap:
    """Return `done` with the optimizers as requested, and with their changes in the plan.

    If ids follow another model's order, the keys next to them get this order too: they are evidence
    for the ids.
    """
    model = done.model
    ruled = done.ruled
    if ruled is not None and wanted.names is None and model is not None:
        ruled = model  # only the file has names: they change as its keys do
    keys = () if model is None else done.result.section(model.section.path).keys
    wanted = replace(wanted, ruled=ruled, model=model, narrowed=done.narrowed, model_keys=keys)
    result, optimizers = remap_optimizers(done.result, wanted)
    if model is None and done.narrowed is not None:  # --select
        changed = {one.section for one in optimizers}
        whole = [section.title for section in result.optimizers if section.path not in changed]
        notes = [f"{title} still holds the state of all parameters" for title in whole]
        done = replace(done, notes=(*done.notes, *notes))
    if wanted.rules and (ruled is None or ruled.renames(ruled.section.keys)):
        done = replace(done, notes=(*done.notes, *_left_in_order(result, optimizers, wanted)))
    if not optimizers:
        return done
    keeps = ruled is None or ruled.keeps_places
    loads = next((one.loaded_by for one in optimizers if one.loaded_by is not None), None)
    target = loads or (wanted.names if keeps else None)
    if target is not None and any(one.to == ID for one in optimizers):
        called = None if loads is not None else _called(done.ruled, wanted.rules)
        ordered = (
            in_order_of(one, target, called) if one.kind == "state_dict" else one
            for one in result.sections
        )
        result = replace(result, sections=tuple(ordered))
    notes = [note for one in optimizers for note in one.notes]
    plan = _with_moves(done.plan, result, [one.move for one in optimizers if one.move is not None])
    return replace(
        done, result=result, plan=plan, optimizers=optimizers, notes=(*done.notes, *notes)
    )


def _left_in_order(
    result: Checkpoint, optimizers: Sequence[OptimizerRemap], wanted: OptimizerRequest
) -> Iterator[str]:
    """Yield a note on each optimizer with ids, whose order rules do not change to the new
    model's.
    """
    known = {one.section for one in optimizers if one.loaded_by is not None}
    for section in result.optimizers:
        state = forms.read(section)
        if (
            state.form == ID
            and section.path not in known
            and not (state.is_stateless and len(state.groups) < 2)
        ):
            ask = shell(
                "ckpttool", "diff", "--model", "NEW", "--optimizer", "O", wanted.output or "OUT"
            )
            which = "" if section.title == "optimizer" else f"{section.title}: "
            yield (
                f"{which}optimizer ids keep the order of the model that saved them; check with"
                f" {ask}"
            )


def _called(ruled: RuleEffect | None, rules: Sequence[Renaming]) -> Callable[[str], str] | None:
    if ruled is None:
        return partial(by_rules, rules=rules) if rules else None
    return lambda name: ruled.called.get(name, name)


def _with_moves(plan: Plan, result: Checkpoint, moves: Sequence[OptimizerMove]) -> Plan:
    """Return the plan with the changes of optimizers, and with its outputs in the order of the
    result's keys.

    Sections of optimizers have outputs only if entries of them are dropped.
    """
    dropped = {gone.section for gone in plan.dropped}
    changed = {move.section for move in moves} - dropped
    outputs: dict[str, list[Output]] = {}
    for output in plan.outputs:
        if output.section not in changed:
            outputs.setdefault(output.section, []).append(output)
    for section in result.sections:
        if section.kind != "optimizer" and section.path in outputs:
            rank = {key: place for place, key in enumerate(section.keys)}
            outputs[section.path] = sorted(
                outputs[section.path], key=lambda output: rank.get(output.key, 0)
            )
    return replace(
        plan, outputs=tuple(in_turn.from_iterable(outputs.values())), optimizers=tuple(moves)
    )
