"""Carries a plan out on the index: a source checkpoint and a plan become the checkpoint that is to be written.

No byte moves here: what a plan only renames keeps its storage, what it computes gets one that is still to be made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.plan import ModelRun, ModuleRename, Output, Plan, module_renames
from ckpttool.core.text import plural, shell
from ckpttool.evaluate import index_eval, ops

_OPAQUE = "only the model's own code can do it: name that, as in --model file.py:build, and no file of names"

Entries = Mapping[str, TensorEntry | ExtraEntry]
# Runs a model's code on the entries of a section, under the model's names: the values of the names that are asked for.
Runner = Callable[[ModelRun, Section, Sequence[str]], Mapping[str, TensorEntry]]
NO_CODE: Mapping[str, Runner] = {}


def apply(plan: Plan, source: Checkpoint, runners: Mapping[str, Runner] = NO_CODE) -> Checkpoint:
    """`source` with the sections that `plan` names rewritten; `runners` (by way) carry out its runs of models' code.

    Raises `Refused`, all problems at once, where the plan does not fit, `CkptError` for operators that are not allowed.
    """
    _check_operators(plan)
    problems = plan.check(source)
    if problems:
        hint = _OPAQUE if any(problem.kind == "opaque" for problem in problems) else "`ckpttool inspect` lists its keys"
        raise Refused("the plan does not fit the checkpoint", hint=hint, problems=problems)
    parts = _by_section(plan)
    sections = [_rewrite(s, parts[s.path], runners) if s.path in parts else s for s in source.sections]
    return replace(source, sections=tuple(sections))


def _by_section(plan: Plan) -> dict[str, Plan]:
    """The part of the plan that is about each section that it rewrites."""
    outputs: dict[str, list[Output]] = {path: [] for path in plan.sections}
    for output in plan.outputs:
        outputs[output.section].append(output)
    modules: dict[str, list[ModuleRename]] = {}
    for module in plan.modules:
        modules.setdefault(module.section, []).append(module)
    runs: dict[str, list[ModelRun]] = {}
    for run in plan.runs:
        runs.setdefault(run.section, []).append(run)
    return {
        path: Plan(tuple(own), (), tuple(modules.get(path, ())), tuple(runs.get(path, ())))
        for path, own in outputs.items()
    }


def _check_operators(plan: Plan) -> None:
    """Raises `CkptError` with every output that is made by an operator that no plan may hold."""
    names = ((name, output.key) for output in plan.computed for name in ex.operators(output.source))
    found = dict.fromkeys((ops.problem(name), key) for name, key in names if name not in (ex.OPAQUE, *ex.BY_CODE))
    problems = [Problem(said, key) for said, key in found if said is not None]
    if problems:
        raise CkptError(
            f"the plan has {plural(len(problems), 'output')} made by what is not an operator that a plan may hold",
            hint="docs/safety.md lists the operators that may stand in a plan",
            problems=problems,
        )


def _rewrite(section: Section, plan: Plan, runners: Mapping[str, Runner]) -> Section:
    """The section as its part of the plan makes it."""
    outputs = list(plan.outputs)
    have: Entries = section.by_key()
    if plan.runs:
        sources, have = run_code(section, [output.source for output in outputs], plan.runs, runners)
        outputs = [replace(output, source=source) for output, source in zip(outputs, sources)]
    aliases = section.aliases() if plan.computed else {}
    modules = {m.old: m.new for m in plan.modules}
    return _with_entries(section, _evaluate(outputs, have, aliases), modules)


def run_code(
    section: Section, sources: Sequence[Expression], runs: Sequence[ModelRun], runners: Mapping[str, Runner]
) -> tuple[list[Expression], Entries]:
    """`sources` with refs in the place of what models' code computes, and the entries that these refer to.

    Raises `Refused` where there is no code to run, and what the runs raise.
    """
    have, keys = dict(section.by_key()), dict[tuple[str, str], str]()

    def known(expression: Expression) -> Expression:
        return ex.with_calls(expression, lambda call: Ref(keys[call.op, str(call.args[0])]))

    for number, run in enumerate(runs):
        later = [source for other in runs[number + 1 :] for source in other.given.values()]
        found = (call for source in (*sources, *later) for call in ex.calls(source) if call.op == run.way)
        names = list(dict.fromkeys(str(call.args[0]) for call in found))
        if not names:
            continue
        given = [Output(section.path, name, known(source)) for name, source in run.given.items()]
        values = _runner(run, names, runners)(run, _given(section, given, have), names)
        for name, entry in values.items():
            key = keys[run.way, name] = _free(f"{run.way}({name})", have)
            have[key] = entry
    return [known(source) for source in sources], have


def _runner(run: ModelRun, names: Sequence[str], runners: Mapping[str, Runner]) -> Runner:
    if run.way not in runners:
        option = "--to-model" if run.way == ex.SAVED and len(runners) else "--model"
        arguments = shell("--model-kwargs", json.dumps(dict(run.kwargs))) if run.kwargs else ""
        raise Refused(
            f"{plural(len(names), 'tensor')} can only be computed by the code of {run.model}",
            hint=f"name it: {option} {shell(run.model)} {arguments}".rstrip(),
            problems=[Problem("computed by code that is no tensor operator", name, "opaque") for name in names],
        )
    return runners[run.way]


def _given(section: Section, given: list[Output], have: Entries) -> Section:
    """The section under the model's names; paths of ``_metadata`` follow where wrappers' segments went."""
    renames = {o.source.key: o.key for o in given if isinstance(o.source, Ref) and o.source.key != o.key}
    moved = module_renames(section.path, section.modules or (), renames)
    return _with_entries(section, _evaluate(given, have, {}), {m.old: m.new for m in moved})


def _free(key: str, have: Entries) -> str:
    return key if key not in have else _free(f"{key}'", have)


def _with_entries(section: Section, entries: list[TensorEntry | ExtraEntry], modules: Mapping[str, str]) -> Section:
    """The section with these entries in the place of its own, and its modules renamed."""
    return replace(
        section,
        tensors=tuple(e for e in entries if isinstance(e, TensorEntry)),
        extras=tuple(e for e in entries if isinstance(e, ExtraEntry)),
        modules=None if section.modules is None else _rename_modules(section.modules, modules),
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
            entry = computed.get(same)
            if entry is None:
                entry = index_eval.entry_of(output.key, output.source, have) or _compute(output, have)
                if not ex.is_constant(same):  # constants that are equal are not tied
                    computed[same] = entry
            entries.append(replace(entry, key=output.key))
        except Refused as error:
            problems.append(Problem(error.message, output.key))
    if problems:
        raise Refused(
            "some values cannot be computed", hint="check dtypes and shapes with `ckpttool diff`", problems=problems
        )
    return entries


def _compute(output: Output, have: Entries) -> TensorEntry:
    from ckpttool.evaluate import torch_eval

    return torch_eval.entry_of(output.key, output.source, {key: have[key] for key in ex.refs(output.source)})


def _rename_modules(modules: Mapping[str, object], renamed: Mapping[str, str]) -> dict[str, object]:
    """`_metadata` under its new paths; where two meet, the one that moved there wins: its tensors moved along."""
    kept = {path: payload for path, payload in modules.items() if path not in renamed}
    moved = {renamed[path]: payload for path, payload in modules.items() if path in renamed}
    order = dict.fromkeys(renamed.get(path, path) for path in modules)
    return {path: moved.get(path, kept.get(path)) for path in order}
