"""Put a checkpoint's weights into an exported program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.containers.program import OUTSIDE
from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.names import Names
from ckpttool.core.plan import Plan
from ckpttool.core.tables import by_key
from ckpttool.evaluate.apply import run_code
from ckpttool.evaluate.compare import same_values
from ckpttool.naming import convert, wrappers
from ckpttool.naming.match import match
from ckpttool.naming.wrappers import Chain, strip
from ckpttool.operands.load_plan import LOAD_HOOK
from ckpttool.operands.model import ModelOperand
from ckpttool.swap.constants import compare_constants
from ckpttool.swap.misfit import Misfit, for_compiled_code, kind_of_advice
from ckpttool.swap.options import SwapOptions
from ckpttool.swap.result import Swap
from ckpttool.swap.weight_map import (
    WeightMap,
    canonical_names,
    chosen_constants,
    constants_of,
    fit_all,
    map_by_keys,
    map_by_model,
    replaced,
)

_DEFAULT = SwapOptions()
_NO_VALUE = "a constant without a new value: the weights do not have it"
_NOT_IN_MODEL = ("missing", "not_in_model")


def swap(
    program: Checkpoint,
    weights: Section,
    model: ModelOperand | None = None,
    options: SwapOptions = _DEFAULT,
    *,
    remade: bool = False,
    compare: bool = True,
) -> Swap:
    """Return the swap of `program`, each of whose weights gets its value in `weights`.

    Of the options, `from_`, `cast`, `constants` and `keep_constants` count. `remade` also sets
    buffers that the model's loading computes from the checkpoint, as `constants` does, unless
    `keep_constants`; `compare` compares the other constants with the model's. A program in memory
    also takes tensors that are not dense (quantized, sparse, subclasses): they are objects like
    any other there.

    Raises `Refused`, with all problems at once, if a weight is missing, unexpected, of another
    shape or dtype, if the names of one tensor get different values, or if a constant has another
    value in the model (compared with `compare`) and no option decides.
    """
    if not program.sections:
        raise Refused(
            f"{program.source} is compiled code that holds its weights itself", hint=OUTSIDE
        )
    names, code = (None, None) if model is None else (model.names(), model.code)
    sides = _sides(program, weights, options)
    chosen = chosen_constants(program, sides.weights) if options.constants else {}
    weight_map = _map(program, sides, model, options, chosen)
    if (options.constants or remade) and not options.keep_constants:
        weight_map.sources.update(weight_map.remade)
    sources, values = _evaluated(weight_map, code)

    kept, outside = _not_in_weights(program, sides, weight_map.sources, names)
    compared = outside if compare else []
    constants = compare_constants(compared, canonical_names(program), code, weight_map, options)
    sources.update(constants.sources)
    values.update(constants.values)
    values.update((counter.key, counter) for counter in sides.counters)
    problems = [*weight_map.problems, *constants.problems]
    if options.constants:
        kept = tuple(key for key in kept if key not in sources)
        if code is None and not (chosen or weight_map.remade):
            problems += [Problem(_NO_VALUE, entry.key, "no_value") for entry in outside]

    unknown = [problem.key for problem in weight_map.problems if problem.kind in _NOT_IN_MODEL]
    changing = _changing(program, sides, sources, [*kept, *unknown])
    fitted, misfits = fit_all(changing, sources, values, options.cast, program.in_memory)
    problems += misfits
    problems += _tie_problems(weight_map.twins, by_key(weight_map.weights.tensors))
    for section in program.sections:
        problems += _tie_problems(section.aliases().items(), fitted)
    if problems:
        advice = kind_of_advice(program, names, sides.weights, problems, options.constants)
        problems = [for_compiled_code(program, problem, values) for problem in problems]
        raise Misfit(program.source, advice, problems)
    swapped = Swap(
        _with_values(program, fitted),
        weight_map.sources,
        weight_map.form,
        ignored=(*weight_map.ignored, *sides.unused_counters),
        kept=kept,
        compared=tuple(constants.compared),
        notes=() if names is None or names.roundtrips else (convert.NOT_READ_BACK,),
    )
    return _over_the_file(swapped, weight_map.loaded)


class _Sides(NamedTuple):
    """The weights of the program (`target`) and the new `weights`, without the counters of
    AveragedModels; and these, in order.
    """

    target: Section
    old_counters: list[TensorEntry]
    weights: Section
    counters: list[TensorEntry]

    @property
    def counter_sources(self) -> dict[str, Expression]:
        """Each counter of the program that gets a value, and the key of the new one."""
        sources: dict[str, Expression] = {}
        for old, new in zip(self.old_counters, self.counters):
            sources[old.key] = Ref(new.key)
        return sources

    @property
    def kept_counters(self) -> list[str]:
        """The counters of the program that get no value."""
        return [counter.key for counter in self.old_counters[len(self.counters) :]]

    @property
    def unused_counters(self) -> list[str]:
        """The new counters that the program has no place for."""
        return [counter.key for counter in self.counters[len(self.old_counters) :]]


def _sides(program: Checkpoint, weights: Section, options: SwapOptions) -> _Sides:
    weights, counters = _without_counters(weights)
    more = (wrappers.COUNTER,) if counters else ()
    target, old_counters = _without_counters(program.section(""), more)
    if isinstance(options.source_form, Chain):
        weights = _unwrapped(weights, options.source_form)
    return _Sides(target, old_counters, weights, counters)


def _evaluated(
    weight_map: WeightMap, code: ModelOperand | None
) -> tuple[dict[str, Expression], dict[str, Any]]:
    """Return the sources after the runs of the model's own code, and the entries that they name."""
    runners = {} if code is None else {run.way: code.run for run in weight_map.runs}
    expressions = list(weight_map.sources.values())
    results, entries = run_code(weight_map.weights, expressions, weight_map.runs, runners)
    return dict(zip(weight_map.sources, results)), dict(entries)


def _not_in_weights(
    program: Checkpoint, sides: _Sides, sources: Mapping[str, Expression], names: Names | None
) -> tuple[tuple[str, ...], list[TensorEntry]]:
    """Return the keys of the program that keep their values, and the tensors that the weights do
    not have and the model may have: constants, and buffers that are not saved.
    """
    unsaved = _unsaved(names, sides.target, sources)
    outside = [entry for entry in constants_of(program) if entry.key not in sources]
    outside += [entry for entry in sides.target.tensors if entry.key in unsaved]
    return (*sides.kept_counters, *unsaved), outside


def _changing(
    program: Checkpoint, sides: _Sides, sources: Mapping[str, Expression], kept: Sequence[str]
) -> list[TensorEntry]:
    """Return the tensors of the program that get a value."""
    constants = [entry for entry in constants_of(program) if entry.key in sources]
    tensors = [*sides.target.tensors, *sides.old_counters, *constants]
    return [entry for entry in tensors if entry.key not in kept]


def _map(
    program: Checkpoint,
    sides: _Sides,
    model: ModelOperand | None,
    options: SwapOptions,
    chosen: Mapping[str, Expression],
) -> WeightMap:
    """Map the weights and the counters to the program's names. A weight that gives one of the
    `chosen` constants its value is not matched with anything else.
    """
    used = set(ex.refs(tuple(chosen.values())))
    rest = tuple(entry for entry in sides.weights.tensors if entry.key not in used)
    for_constants = tuple(entry for entry in sides.weights.tensors if entry.key in used)
    weights, canonical = replace(sides.weights, tensors=rest), canonical_names(program)
    if model is None:
        weight_map = map_by_keys(sides.target, weights, canonical)
    else:
        constants = {entry.key: canonical[entry.key] for entry in constants_of(program)}
        weight_map = map_by_model(sides.target, constants, weights, model, options.source_form)
    weights = weight_map.weights
    with_constants = replace(weights, tensors=(*weights.tensors, *for_constants))
    weight_map.sources.update(chosen)
    weight_map.sources.update(sides.counter_sources)
    return replace(weight_map, weights=with_constants)


def _unsaved(
    names: Names | None, target: Section, sources: Mapping[str, Expression]
) -> tuple[str, ...]:
    """Return the program's buffers that the model saves in no state dict: they stay, unless the
    weights have them.

    An exported program has them among its constants, compiled code among its weights.
    """
    if names is None:
        return ()
    buffers = [tensor.canonical for tensor in names.runtime if not tensor.persistent]
    matched = match([entry.key for entry in target.tensors], dict(zip(buffers, buffers)))
    return tuple(key for key in matched.names if key not in sources)


def _over_the_file(swapped: Swap, load_plan: Plan | None) -> Swap:
    """Return the swap with sources over the keys of the file, if the weights are what the model has
    after loading it.
    """
    if load_plan is None:
        return swapped
    read = {output.key: output.source for output in load_plan.outputs}
    sources = {}
    for fqn, source in swapped.sources.items():
        sources[fqn] = ex.substitute(source, lambda key: read.get(key, Ref(key)))
    return replace(swapped, sources=sources, form=LOAD_HOOK)


def _without_counters(
    section: Section, more: Sequence[str] = ()
) -> tuple[Section, list[TensorEntry]]:
    """Return the section without the counters of AveragedModels, and the counters: the averaged
    module has none.

    `more` are further names of counters, without the wrapper's segment: the names of a live module
    have no segments.
    """
    keys = {*wrappers.counters([entry.key for entry in section.tensors]), *more}
    rest = tuple(entry for entry in section.tensors if entry.key not in keys)
    return replace(section, tensors=rest), [entry for entry in section.tensors if entry.key in keys]


def _unwrapped(section: Section, form: Chain) -> Section:
    """Return the section under its names inside the wrappers that the user names. Raises `Refused`
    on others.
    """
    keys = section.by_key()
    paths = wrappers.declared(form, keys).paths
    names = {key: strip(key, paths) for key in keys}
    return replace(
        section,
        tensors=tuple(replace(entry, key=names[entry.key]) for entry in section.tensors),
        extras=tuple(replace(entry, key=names[entry.key]) for entry in section.extras),
    )


def _tie_problems(
    ties: Iterable[tuple[str, str]], values: Mapping[str, TensorEntry]
) -> Iterator[Problem]:
    """Yield the names that are tied to another one and would get another value than it."""
    for name, first in ties:
        left, right = values.get(name), values.get(first)
        if left is not None and right is not None and not same_values(left, right):
            yield Problem(f"tied to {first}, but its new value differs", name)


def _with_values(program: Checkpoint, fitted: Mapping[str, TensorEntry]) -> Checkpoint:
    sections = []
    for section in program.sections:
        sections.append(replace(section, tensors=replaced(section.tensors, fitted)))
    return replace(program, sections=tuple(sections))
