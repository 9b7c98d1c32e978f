"""Evaluate expressions, and apply a plan to a checkpoint. No byte moves here: a renamed tensor
keeps its storage, and a computed one gets a storage that is filled when it is written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import AnyEntry, Checkpoint, Entries, ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused, same_problem
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.options import call_text
from ckpttool.core.plan import ModelRun, Output, Plan, module_renames
from ckpttool.core.tables import new_paths
from ckpttool.core.text import plural, shell
from ckpttool.evaluate import ops
from ckpttool.evaluate.compare import digest

# Runs a model's code on the entries of a section, under the model's names, and returns the values
# of the given names.
Runner = Callable[[ModelRun, Section, Sequence[str]], Mapping[str, TensorEntry]]
NO_CODE: Mapping[str, Runner] = {}


def entry_of(key: str, source: Expression, entries: Entries) -> TensorEntry:
    """Return the entry `key` with the value of `source`: on the index if its bytes only move, else
    with torch.

    Dtype and shape are known at once; values are computed when they are read. Raises `Refused` if
    an operator does not fit its arguments, or if an argument is not a dense tensor.
    """
    entry = ops.on_index(key, source, entries)
    if entry is None:
        from ckpttool.evaluate import torch_eval

        entry = torch_eval.entry_of(key, source, entries)
    return entry


class Digests:
    """Hashes of expressions over the keys of one section. Each is computed once, when it is first
    requested.
    """

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._digests: dict[Expression, bytes | None] = {}

    def of(self, value: Expression) -> bytes | None:
        """Return the hash of the value's bytes in row-major order; None for a key that is not a
        dense tensor.
        """
        if value in self._digests:
            return self._digests[value]
        if isinstance(value, Ref):
            entry = self._entries[value.key]
        else:
            entry = entry_of("", value, self._entries)
        self._digests[value] = None
        if isinstance(entry, TensorEntry) and entry.storage is not None:
            self._digests[value] = digest(entry)
        return self._digests[value]


def apply(plan: Plan, source: Checkpoint, runners: Mapping[str, Runner] = NO_CODE) -> Checkpoint:
    """Return `source` with the plan's sections rewritten; `runners` (by way) run the models' code.

    Raises `Refused`, with all problems, if the plan does not fit, and `CkptError` for operators
    that are not allowed.
    """
    problems = _refused_operators(plan)
    if problems:
        raise CkptError(
            "the plan uses operators that are not allowed",
            hint="docs/safety.md lists the operators that a plan may hold",
            problems=problems,
        )
    problems = plan.check(source)
    if problems:
        hint = "`ckpttool inspect` lists its keys"
        if any(problem.kind == "opaque" for problem in problems):
            hint = (
                "pass --model file.py:build: only the model's code can compute these values, a"
                " names file cannot"
            )
        raise Refused("the plan does not fit the checkpoint", hint=hint, problems=problems)
    outputs: dict[str, list[Output]] = {path: [] for path in plan.sections}
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    runs: dict[str, list[ModelRun]] = defaultdict(list)
    for output in plan.outputs:
        outputs[output.section].append(output)
    for module in plan.modules:
        modules[module.section][module.old] = module.new
    for run in plan.runs:
        runs[run.section].append(run)
    sections = []
    for section in source.sections:
        path = section.path
        if path in outputs:
            section = _rewritten(section, outputs[path], modules[path], runs[path], runners)
        sections.append(section)
    return replace(source, sections=tuple(sections))


def _refused_operators(plan: Plan) -> list[Problem]:
    """Return a problem for each operator of an output that no plan may hold."""
    problems: dict[Problem, None] = {}
    for output in plan.computed:
        for operator in ex.operators(output.source):
            if operator in (ex.OPAQUE, *ex.BY_CODE):
                continue
            reason = ops.reason_not_allowed(operator)
            if reason is not None:
                problems[Problem(reason, output.key)] = None
    return list(problems)


def _rewritten(
    section: Section,
    outputs: Sequence[Output],
    modules: Mapping[str, str],
    runs: Sequence[ModelRun],
    runners: Mapping[str, Runner],
) -> Section:
    entries: Entries = section.by_key()
    if runs:
        sources, entries = run_code(section, [output.source for output in outputs], runs, runners)
        outputs = [replace(output, source=source) for output, source in zip(outputs, sources)]
    aliases: Mapping[str, str] = {}
    if any(not isinstance(output.source, Ref) for output in outputs):
        aliases = section.aliases()
    return _with_outputs(section, outputs, entries, aliases, modules)


def run_code(
    section: Section,
    sources: Sequence[Expression],
    runs: Sequence[ModelRun],
    runners: Mapping[str, Runner],
) -> tuple[list[Expression], Entries]:
    """Run the models' code. Return `sources` with refs instead of calls, and the entries that the
    refs name.

    Raises `Refused` if the code is missing, and the errors of the runs.
    """
    entries = dict(section.by_key())
    # way of a run and name -> key of the value; a later run may read values of earlier ones
    keys: dict[tuple[str, str], str] = {}

    def without_calls(expression: Expression) -> Expression:
        return ex.with_calls(expression, lambda call: Ref(keys[call.op, str(call.args[0])]))

    for number, run in enumerate(runs):
        names = _names_needed(run, sources, runs[number + 1 :])
        if not names:
            continue
        if run.way not in runners:
            raise _without_code(run, names, bool(runners))
        outputs: list[Output] = []
        renames: dict[str, str] = {}
        for name, source in run.given.items():
            source = without_calls(source)
            outputs.append(Output(section.path, name, source))
            if isinstance(source, Ref) and source.key != name:
                renames[source.key] = name
        moves = module_renames(section.path, section.modules or (), renames)
        modules = new_paths(moves)
        given = _with_outputs(section, outputs, entries, {}, modules)
        values = runners[run.way](run, given, names)
        for name, entry in values.items():
            key = f"{run.way}({name})"
            while key in entries:
                key += "'"
            keys[run.way, name] = key
            entries[key] = entry
    return [without_calls(source) for source in sources], entries


def _without_code(run: ModelRun, names: Sequence[str], has_runners: bool) -> Refused:
    """Return the error for values that only a model's code computes."""
    option = "--to-model" if run.way == ex.SAVED and has_runners else "--model"
    problem = "computed by code that is not a tensor operator"
    return Refused(
        f"{plural(len(names), 'tensor')} can only be computed by the code of {run.model}",
        hint=f"name it: {option} {shell(call_text(run.model, run.kwargs))}",
        problems=same_problem(problem, names, "opaque"),
    )


def _names_needed(
    run: ModelRun, sources: Sequence[Expression], later: Sequence[ModelRun]
) -> list[str]:
    """Return the names of the run's values that the sources and later runs need."""
    needed = list(sources)
    for other in later:
        needed += other.given.values()
    names: dict[str, None] = {}
    for call in ex.calls(tuple(needed)):
        if call.op == run.way:
            names[str(call.args[0])] = None
    return list(names)


def _with_outputs(
    section: Section,
    outputs: Sequence[Output],
    entries: Entries,
    aliases: Mapping[str, str],
    renamed_modules: Mapping[str, str],
) -> Section:
    """Return the section with these outputs and module paths.

    Two outputs with one expression share one storage, as their sources do. `aliases` maps a
    tensor's further names to its first: values computed from tied weights stay tied.
    """
    computed: dict[ex.Argument, TensorEntry] = {}
    results: list[AnyEntry] = []
    problems: list[Problem] = []
    for output in outputs:
        if isinstance(output.source, Ref):
            results.append(entries[output.source.key].under(output.key))
            continue
        try:
            source = ex.substitute(output.source, lambda key: Ref(aliases.get(key, key)))
            entry = computed.get(source) or entry_of(output.key, output.source, entries)
            if not ex.is_constant(source):  # equal constants are not tied
                computed[source] = entry
            results.append(replace(entry, key=output.key))
        except Refused as error:
            problems.append(Problem(error.message, output.key))
    if problems:
        hint = "check dtypes and shapes with `ckpttool diff`"
        raise Refused("some values cannot be computed", hint=hint, problems=problems)
    tensors = tuple(entry for entry in results if isinstance(entry, TensorEntry))
    extras = tuple(entry for entry in results if isinstance(entry, ExtraEntry))
    modules = section.modules
    if modules is not None:
        modules = _rename_modules(modules, renamed_modules)
    is_only_renamed = all(isinstance(output.source, Ref) for output in outputs)
    return replace(
        section,
        tensors=tensors,
        extras=extras,
        modules=modules,
        has_runtime_names=section.has_runtime_names and is_only_renamed,
    )


def _rename_modules(modules: Mapping[str, object], renamed: Mapping[str, str]) -> dict[str, object]:
    """Rename the paths of `_metadata`. If two become one, the renamed one wins: its tensors are
    there.
    """
    result: dict[str, object] = {}
    for path, payload in modules.items():
        if path in renamed:
            result[renamed[path]] = payload
        else:
            result.setdefault(path, payload)
    return result
