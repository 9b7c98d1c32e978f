"""Carries a plan out on the index: a source checkpoint and a plan become the checkpoint that is to be written.

No byte moves here: what a plan only renames keeps its storage, what it computes gets one that is still to be made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttool import expression as ex
from ckpttool.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry
from ckpttool.errors import CkptError, Problem, Refused
from ckpttool.evaluate import operators, without_torch
from ckpttool.expression import Ref
from ckpttool.plan import Output, Plan
from ckpttool.words import plural

_OPAQUE = (
    "only the model's own code can do it: load the checkpoint into the model, and save its state_dict(), or "
    "dict(model.named_parameters()) for runtime names"
)

Entries = Mapping[str, TensorEntry | ExtraEntry]


def apply(plan: Plan, source: Checkpoint) -> Checkpoint:
    """`source` with the sections that `plan` names rewritten.

    Raises `Refused`, all problems at once, where the plan does not fit, `CkptError` for operators that are not allowed.
    """
    _check_operators(plan)
    problems = plan.check(source)
    if problems:
        hint = _OPAQUE if any(problem.kind == "opaque" for problem in problems) else "`ckpttool inspect` lists its keys"
        raise Refused("the plan does not fit the checkpoint", hint=hint, problems=problems)
    rewritten = set(plan.sections)
    sections = [_rewrite(s, plan) if s.path in rewritten else s for s in source.sections]
    return replace(source, sections=tuple(sections))


def _check_operators(plan: Plan) -> None:
    """Raises `CkptError` with every output that is made by an operator that no plan may hold."""
    names = ((name, output.key) for output in plan.outputs for name in operators.operators_in(output.source))
    found = dict.fromkeys((operators.problem(name), key) for name, key in names if name != ex.OPAQUE)
    problems = [Problem(said, key) for said, key in found if said is not None]
    if problems:
        raise CkptError(
            f"the plan has {plural(len(problems), 'output')} made by what is not an operator that a plan may hold",
            hint="docs/safety.md lists the operators that may stand in a plan",
            problems=problems,
        )


def _rewrite(section: Section, plan: Plan) -> Section:
    have = section.by_key()
    aliases = {} if plan.is_renames else section.aliases()
    entries = _evaluate([o for o in plan.outputs if o.section == section.path], have, aliases)
    modules = section.modules
    if modules is not None:
        renamed = {m.old: m.new for m in plan.modules if m.section == section.path}
        modules = _rename_modules(modules, renamed)
    return replace(
        section,
        tensors=tuple(e for e in entries if isinstance(e, TensorEntry)),
        extras=tuple(e for e in entries if isinstance(e, ExtraEntry)),
        modules=modules,
    )


def _evaluate(outputs: list[Output], have: Entries, aliases: Mapping[str, str]) -> list[TensorEntry | ExtraEntry]:
    """The outputs as entries; two outputs with one expression share one storage, as the tensors they come from did.

    `aliases` lead from a tensor's further names to its first: what is made of tied weights stays tied.
    """
    computed: dict[ex.Argument, TensorEntry] = {}
    entries: list[TensorEntry | ExtraEntry] = []
    problems: list[Problem] = []
    for output in outputs:
        if isinstance(output.source, Ref):
            entries.append(have[output.source.key].under(output.key))
            continue
        try:
            same = ex.substitute(output.source, lambda key: Ref(aliases.get(key, key)))
            if same not in computed:
                computed[same] = without_torch.entry_of(output.key, output.source, have) or _compute(output, have)
            entries.append(replace(computed[same], key=output.key))
        except Refused as error:
            problems.append(Problem(error.message, output.key))
    if problems:
        raise Refused(
            "some values cannot be computed", hint="check dtypes and shapes with `ckpttool diff`", problems=problems
        )
    return entries


def _compute(output: Output, have: Entries) -> TensorEntry:
    from ckpttool.evaluate import with_torch  # torch is loaded only where something is computed

    return with_torch.entry_of(output.key, output.source, {key: have[key] for key in ex.refs(output.source)})


def _rename_modules(modules: Mapping[str, object], renamed: Mapping[str, str]) -> dict[str, object]:
    """`_metadata` under its new paths; where two meet, the one that moved there wins: its tensors moved along."""
    kept = {path: payload for path, payload in modules.items() if path not in renamed}
    moved = {renamed[path]: payload for path, payload in modules.items() if path in renamed}
    order = dict.fromkeys(renamed.get(path, path) for path in modules)
    return {path: moved.get(path, kept.get(path)) for path in order}
