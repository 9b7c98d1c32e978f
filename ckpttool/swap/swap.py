"""Put a checkpoint's weights into an exported program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from ckpttool.containers.pickle_read import collected
from ckpttool.containers.program import INSIDE, OUTSIDE, is_inlined, program_of
from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.names import RUNTIME, Names
from ckpttool.core.options import IS, ModelOptions, Option, OutputOptions
from ckpttool.core.pickle_imports import dangerous
from ckpttool.core.plan import Plan
from ckpttool.core.schema import (
    COUNT,
    FLAG,
    TEXT,
    TEXTS,
    list_of,
    notes_as,
    nullable,
    one_of,
    record,
    unless_empty,
)
from ckpttool.core.text import Info, Note, plural, shell
from ckpttool.core.values import dataclass, public
from ckpttool.evaluate.apply import apply, run_code
from ckpttool.evaluate.compare import difference, same_values
from ckpttool.formats.opening import not_looked_into
from ckpttool.formats.registry import format_of, recognize
from ckpttool.io.files import look_anew
from ckpttool.kinds.adapters import adapter_of
from ckpttool.kinds.quantized import quantized_weights
from ckpttool.naming import convert, wrappers
from ckpttool.naming.convert import Form, ModelForm
from ckpttool.naming.match import match
from ckpttool.naming.wrappers import Chain, strip
from ckpttool.operands.checkpoint import model_section, split
from ckpttool.operands.load_plan import LOAD_HOOK, by_loading
from ckpttool.operands.model import ModelOperand, operand_of
from ckpttool.operands.output import outputs
from ckpttool.operands.reading import as_read, read_for_model
from ckpttool.operands.same_model import same_model
from ckpttool.remapping.carried_code import check_code
from ckpttool.remapping.write import COST, VERIFIED, Cost, Verified, Writer, cost_of
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


@dataclass(frozen=True, kw_only=True)
class SwapOptions(ModelOptions, OutputOptions):
    """All options of a swap."""

    name: Annotated[
        str | None, Option("--program NAME", "Which one, where PROGRAM holds several.")
    ] = None
    from_: Annotated[
        str | None,
        Option("--from FORM", "NEW's naming; default: recognized.", IS, choices=convert.words),
    ] = None
    cast: Annotated[
        bool, Option("--cast", "Convert weights of another dtype to the program's.")
    ] = False
    constants: Annotated[
        bool,
        Option(
            "--constants",
            "Swap constants too (lifted tensors, unsaved buffers): from NEW, or else from MODEL.",
        ),
    ] = False
    keep_constants: Annotated[
        bool,
        Option("--keep-constants", "Keep the program's constants, even if MODEL has other values."),
    ] = False

    @property
    def source_form(self) -> Form | None:
        """The form of NEW's keys, if the user names one. Raises `CkptError` for an unknown form."""
        return None if self.from_ is None else convert.parse(self.from_)

    def check(self) -> None:
        if self.constants and self.keep_constants:
            raise CkptError(
                "--constants and --keep-constants exclude each other", hint="choose one"
            )
        if self.from_ is not None:
            convert.parse(self.from_)


_DEFAULT = SwapOptions()


class ComparedConstant(NamedTuple):
    """A tensor of the program that is not in NEW, compared with the model's; `reason` says why it
    is not equal.

    `verdict` is ``equal``, ``different`` (and unchanged), ``from_model`` (its new value) or
    ``not_compared``.
    """

    name: str
    verdict: str
    reason: str = ""


@public
@dataclass(frozen=True, slots=True)
class Swap:
    """The program with its new weights. `sources`: FQN -> expression over the checkpoint's keys.

    `unchanged`: the program had all of these values before. `compared` compares each constant that
    is not in NEW with the model's. `form` is the form of the checkpoint's keys; `ignored` are its
    entries that no program holds. `kept` are tensors of the program that no checkpoint of the model
    has: counters of AveragedModels, buffers that are not saved. `cost` is the result of a dry run,
    `verified` how the output was checked. `source`, `weights` and `output` are the operands:
    PROGRAM, NEW, and OUT. `notes` are on what was read.
    """

    program: Checkpoint
    sources: Mapping[str, Expression]
    form: str
    ignored: tuple[str, ...]
    kept: tuple[str, ...] = ()
    compared: tuple[ComparedConstant, ...] = ()
    cost: Cost | None = None
    verified: Verified | None = None
    source: str = ""
    weights: str = ""
    output: str = ""
    unchanged: bool = False
    notes: tuple[str, ...] = ()

    @property
    def constants(self) -> tuple[str, ...]:
        """The program's constants that are unchanged."""
        new = set(self.sources)
        new.update(const.name for const in self.compared if const.verdict == "from_model")
        return tuple(entry.key for entry in constants_of(self.program) if entry.key not in new)

    @property
    def by_code(self) -> tuple[str, ...]:
        """The weights that were computed by running the model's own loading on the checkpoint."""
        return tuple(fqn for fqn, source in self.sources.items() if any(ex.calls(source)))

    def values_json(self) -> dict[str, object]:
        return {fqn: ex.to_json(source) for fqn, source in self.sources.items()}

    @property
    def layout(self) -> str:
        file = program_of(self.program)
        return self.program.format if file is None else file.layout

    def to_json(self) -> dict[str, Any]:
        """Return the `swap-weights` object of the contract."""
        return dict(SWAP.write(self))


SWAP = record(
    Swap,
    {
        **dict.fromkeys(("program", "weights", "output"), TEXT),
        "swapped": COUNT,
        "unchanged": FLAG,
        **dict.fromkeys(("kept", "constants"), TEXTS),
        "constant_values": list_of(
            record(
                ComparedConstant,
                {
                    "name": TEXT,
                    "verdict": one_of("equal", "different", "from_model", "not_compared"),
                    "reason": nullable(unless_empty(TEXT)),
                },
            )
        ),
        **dict.fromkeys(("layout", "from"), TEXT),
        **dict.fromkeys(("ignored", "by_code"), TEXTS),
        "notes": notes_as("reader"),
    },
    {"verified": VERIFIED, "cost": COST},
    called={
        "program": "source",
        "constant_values": "compared",
        "swapped": lambda swapped: len(swapped.sources),
        "from": "form",
    },
    title="ckpttool.swap/1",
)
_REMADE = "a constant of the program, which the model's loading computes from the checkpoint"
# What to do about weights that do not fit: a kind, and the hint of the command line.
Advice = Literal[
    "constants",
    "values",
    "code",
    "compiled",
    "adapter",
    "quantized",
    "left_over",
    "model",
    "alone",
    "cast",
    "compare",
]
HINTS: dict[Advice, str] = {
    "constants": "some of them are constants of the program: --constants swaps these too",
    "values": "--constants takes the model's values, --keep-constants keeps the program's",
    "code": "a list of names cannot compute them, the model's code can: --model"
    " package.module:attr, or file.py:attr",
    "compiled": INSIDE,
    "adapter": "the weights have an adapter that is not merged into them: merge it first (PEFT's"
    " merge_and_unload() returns the merged model), save its state_dict(), and swap that",
    "quantized": "the weights are quantized: `dequantize` in a rules file of `ckpttool remap`"
    " writes their values (FP8, scaled int8, MXFP4)",
    "left_over": "all weights of the program are there: leave the other keys out, and try again",
    "model": "state_dict hooks may rename keys when a model is saved: pass the model's definition, "
    "--model file.py:build",
    "alone": "the program has the names of these weights: leave --model out",
    "cast": "--cast converts them to the program's dtypes",
    "compare": "`ckpttool diff PROGRAM WEIGHTS` compares the two; the program may be of another"
    " version of the model",
}


class Misfit(Refused):
    """The weights do not fit. `advice` is the kind of the hint, for callers with another hint."""

    def __init__(self, program: str, advice: Advice, problems: Sequence[Problem]) -> None:
        message = f"the weights do not fit {program}: {plural(len(problems), 'problem')}"
        super().__init__(message, hint=HINTS[advice], problems=problems)
        self.advice = advice


def swap(
    program: Checkpoint,
    weights: Section,
    model: ModelOperand | None = None,
    options: SwapOptions = _DEFAULT,
    *,
    remade: bool = False,
    compare: bool = True,
) -> Swap:
    """Return `program` with every weight replaced by its value in `weights`.

    Of the options, `from_`, `cast`, `constants` and `keep_constants` count. Buffers that the
    model's loading computes from the checkpoint follow with `constants` or `remade`. A program in
    memory also takes tensors that are not dense (quantized, sparse, subclasses), which are objects
    like any other there.

    Raises `Refused`, with all problems at once, if a weight is missing, unexpected, of another
    shape or dtype, if the names of one tensor get different values, or if a constant has another
    value in the model (compared with `compare`) and no option decides.
    """
    names, code = (None, None) if model is None else (model.names(), model.code)
    if not program.sections:
        raise Refused(
            f"{program.source} is compiled code that holds its weights itself", hint=OUTSIDE
        )
    sides = _sides(program, weights, options)
    chosen = chosen_constants(program, sides.weights) if options.constants else {}
    weight_map, weights, by_loading = _map(program, sides, model, options, chosen)
    problems = list(weight_map.problems)
    if (options.constants or remade) and not options.keep_constants:
        weight_map.sources.update(weight_map.remade)
    weight_map.sources.update(chosen)
    for old, new in zip(sides.old_counters, sides.counters):
        weight_map.sources[old.key] = Ref(new.key)
    sources, computed = _evaluated(weight_map, weights, code)

    kept, outside = _not_in_weights(program, sides, weight_map.sources, names)
    verdict = "from_model" if options.constants else "different"
    canonical = canonical_names(program)
    state_dict = weight_map.state_dict
    remade_constants = set() if options.keep_constants else set(weight_map.remade)
    compared, values = _compared(outside if compare else [], canonical, code, state_dict, verdict)
    for constant in compared:
        if constant.verdict == "from_model":
            sources[constant.name] = Ref(_of_model(constant.name))
        elif constant.verdict == "different" and not options.keep_constants:
            text = f"the model has another value for it ({constant.reason})"
            problems.append(Problem(text, constant.name, "value"))
        elif constant.verdict == "not_compared" and constant.name in remade_constants:
            problems.append(Problem(_REMADE, constant.name))
    if options.constants:
        kept = tuple(key for key in kept if key not in sources)

    have = {**computed, **{entry.key: entry for entry in sides.counters}, **values}
    changing = _changing(program, sides, sources, kept)
    fitted, misfits = fit_all(changing, sources, have, options.cast, program.in_memory)
    problems += misfits
    problems += _untied(weight_map.twins, {entry.key: entry for entry in weights.tensors})
    for section in program.sections:
        problems += _untied(section.aliases().items(), fitted)
    if problems:
        advice = _advice(program, names, sides.weights, problems, options.constants)
        problems = [_for_compiled_code(program, problem, have) for problem in problems]
        raise Misfit(program.source, advice, problems)
    extra_counters = [entry.key for entry in sides.counters[len(sides.old_counters) :]]
    swapped = Swap(
        _with_values(program, fitted),
        weight_map.sources,
        weight_map.form,
        ignored=(*weight_map.ignored, *extra_counters),
        kept=kept,
        compared=tuple(compared),
        notes=() if names is None or names.roundtrips else (convert.NOT_READ_BACK,),
    )
    return swapped if by_loading is None else _over_the_file(swapped, by_loading)


class _Sides(NamedTuple):
    """The weights of the program and the new ones, without the counters of AveragedModels."""

    target: Section
    old_counters: list[TensorEntry]
    weights: Section
    counters: list[TensorEntry]


def _sides(program: Checkpoint, weights: Section, options: SwapOptions) -> _Sides:
    weights, counters = _without_counters(weights)
    more = (wrappers.COUNTER,) if counters else ()
    target, old_counters = _without_counters(program.section(""), more)
    if isinstance(options.source_form, Chain):
        weights = _unwrapped(weights, options.source_form)
    return _Sides(target, old_counters, weights, counters)


def _evaluated(
    weight_map: WeightMap, weights: Section, code: ModelOperand | None
) -> tuple[dict[str, Expression], Mapping[str, Any]]:
    """Return the sources after the runs of the model's own code, and the entries that they name."""
    runners = {} if code is None else {run.way: code.run for run in weight_map.runs}
    expressions = list(weight_map.sources.values())
    results, computed = run_code(weights, expressions, weight_map.runs, runners)
    return dict(zip(weight_map.sources, results)), computed


def _not_in_weights(
    program: Checkpoint, sides: _Sides, sources: Mapping[str, Expression], names: Names | None
) -> tuple[tuple[str, ...], list[TensorEntry]]:
    """Return the keys of the program that no checkpoint of the model has, and the tensors that the
    weights do not have: constants, and buffers that are not saved.
    """
    unsaved = _unsaved(names, sides.target, sources)
    kept = [entry.key for entry in sides.old_counters[len(sides.counters) :]]
    outside = [entry for entry in constants_of(program) if entry.key not in sources]
    outside += [entry for entry in sides.target.tensors if entry.key in unsaved]
    return (*kept, *unsaved), outside


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
) -> tuple[WeightMap, Section, Plan | None]:
    """Map the weights to the program's names, without those that give `chosen` constants a value.

    Also return the weights under the names that the map uses; and if these come from loading them
    into the model, this load as a plan.
    """
    target, weights = sides.target, sides.weights
    form, canonical = options.source_form, canonical_names(program)
    used = set(ex.refs(tuple(chosen.values())))
    rest = tuple(entry for entry in weights.tensors if entry.key not in used)
    for_constants = tuple(entry for entry in weights.tensors if entry.key in used)
    section = replace(weights, tensors=rest)
    if model is None:
        return map_by_keys(target, section, canonical), weights, None
    load_plan = by_loading(model, section) if form is None else None
    if load_plan is not None:
        loaded = apply(load_plan, Checkpoint.of(section)).section(section.path)
        section = replace(loaded, form=RUNTIME)
        weights = replace(section, tensors=(*section.tensors, *for_constants))
    constants = {entry.key: canonical[entry.key] for entry in constants_of(program)}
    form_name = form.names if isinstance(form, ModelForm) else None
    return map_by_model(target, constants, section, model, form_name), weights, load_plan


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


def _over_the_file(swapped: Swap, by_loading: Plan) -> Swap:
    """Return the swap with sources over the keys of the file, not over what the model loads."""
    read = {output.key: output.source for output in by_loading.outputs}
    sources = {}
    for fqn, source in swapped.sources.items():
        sources[fqn] = ex.substitute(source, lambda key: read.get(key, Ref(key)))
    return replace(swapped, sources=sources, form=LOAD_HOOK)


def _compared(
    entries: Sequence[TensorEntry],
    names: Mapping[str, str],
    code: ModelOperand | None,
    state_dict: Section | None,
    if_different: str,
) -> tuple[list[ComparedConstant], dict[str, TensorEntry]]:
    """Compare the program's tensors, by their canonical names, with the model's after it has loaded
    `state_dict`; also return the values that differ. `if_different` is the verdict on these.
    """
    if code is None or not entries:
        reason = "no code of a model was given"
        return [ComparedConstant(entry.key, "not_compared", reason) for entry in entries], {}
    model_values = code.constants([names[entry.key] for entry in entries], state_dict)
    compared: list[ComparedConstant] = []
    different: dict[str, TensorEntry] = {}
    for entry in entries:
        value = model_values[names[entry.key]]
        if isinstance(value, str):
            compared.append(ComparedConstant(entry.key, "not_compared", value))
        elif entry.storage is None:
            reason = "the program does not tell its value"
            compared.append(ComparedConstant(entry.key, "not_compared", reason))
        elif same_values(entry, value):
            compared.append(ComparedConstant(entry.key, "equal"))
        else:
            compared.append(ComparedConstant(entry.key, if_different, _difference(entry, value)))
            different[_of_model(entry.key)] = value
    return compared, different


def _difference(entry: TensorEntry, value: TensorEntry) -> str:
    if (entry.dtype, entry.shape) != (value.dtype, value.shape):
        program_has = f"the program has {entry.dtype} {list(entry.shape)}"
        return f"{value.dtype} {list(value.shape)}, {program_has}"
    differs = difference(entry, value, 0, 0)
    return "" if differs is None else differs.text


def _of_model(name: str) -> str:
    return f"{name} of the model"


def _for_compiled_code(
    program: Checkpoint, problem: Problem, have: Mapping[str, object]
) -> Problem:
    file, entry = program_of(program), have.get(problem.key)
    if file is None or not file.compiled or problem.kind != "left_over":
        return problem
    if not isinstance(entry, TensorEntry):
        return problem
    if not is_inlined(entry):
        return replace(problem, problem="unexpected: the compiled code does not use it")
    size = plural(entry.numel, "element")
    text = f"{size}: written into the compiled code, and cannot be swapped"
    return replace(problem, problem=text)


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


def _untied(
    ties: Iterable[tuple[str, str]], values: Mapping[str, TensorEntry]
) -> Iterator[Problem]:
    """Yield the names that are tied to another one and would get another value."""
    for name, first in ties:
        left, right = values.get(name), values.get(first)
        if left is not None and right is not None and not same_values(left, right):
            yield Problem(f"tied to {first}, and its new value is another one", name)


def _with_values(program: Checkpoint, fitted: Mapping[str, TensorEntry]) -> Checkpoint:
    sections = []
    for section in program.sections:
        sections.append(replace(section, tensors=replaced(section.tensors, fitted)))
    return replace(program, sections=tuple(sections))


def _advice(
    program: Checkpoint,
    names: Names | None,
    weights: Section,
    problems: Sequence[Problem],
    constants: bool,
) -> Advice:
    file = program_of(program)
    keys: defaultdict[str, set[str]] = defaultdict(set)  # by the kind of problem
    for problem in problems:
        keys[problem.kind].add(problem.key)
    if keys.keys() == {"value"}:
        return "values"
    left_over = keys.get("left_over", set())
    # without these keys the other weights are not what was trained
    if adapter_of(left_over) is not None:
        return "adapter"
    if any(not left_over.isdisjoint(weight.keys) for weight in quantized_weights(weights)):
        return "quantized"
    constant_names = {entry.key for entry in constants_of(program)}
    if not constants and any(problem.key in constant_names for problem in problems):
        return "constants"
    if "opaque" in keys:
        return "code"
    if "left_over" in keys and file is not None and file.compiled:
        return "compiled"
    if keys.keys() == {"left_over"}:
        return "left_over"
    has_other_names = "left_over" in keys or "missing" in keys
    if names is None and has_other_names:
        return "model"
    if "left_over" in keys and keys["left_over"] == keys.get("missing"):
        return "alone"
    if "dtype" in keys and "shape" not in keys and not has_other_names:
        return "cast"
    return "compare"


def run(program: str, weights: Checkpoint, options: SwapOptions) -> Swap:
    """Put new weights into `program` (``PATH`` or ``PATH::NAME``), and write it if `options` name
    an output.

    Raises `Refused`, with all problems at once, if they do not fit, and `CkptError` if the program
    cannot be read or OUT cannot be written; then nothing is written.
    """
    path, picked = split(program)
    look_anew(path)
    name = picked if options.name is None else options.name
    target = None if options.dry_run else options.target(path)
    writer = Writer(path, options)
    if target is not None:
        writer.check_file(target, split(weights.source)[0])
    with collected() as imports:
        deployed = _read(path, name, weights, options.out)
    if not options.keep_pickled_code:
        check_code(deployed, {imported.name for imported in dangerous(imports)})
    model = operand_of(options)
    new = model_section(read_for_model(weights, model))
    if model is not None and options.source_form is ModelForm.PRETRAINED:
        model = model.by_pretrained
    elif model is not None and options.source_form is None:
        model = as_read(model, new, weights.source)
    try:
        swapped = swap(deployed, new, model, options)
    except Misfit as error:
        if error.advice == "left_over":
            error.hint = _drop_left_over(error, weights, new)
        raise
    if not swapped.sources and all(const.verdict != "from_model" for const in swapped.compared):
        raise Refused(
            f"nothing to swap: no key of {weights.source} is a weight of {path}",
            hint="compare the two: " + shell("ckpttool", "diff", program, weights.source),
        )
    notes = [*weights.notes, *not_looked_into(imports)]
    if format_of(deployed).holds.code_storages:
        notes += [Info(f"kept, not compared: {note}", "constants") for note in deployed.notes]
    for other in same_model(weights, new, None if model is None else model.names()):
        same = f"{weights.part(other.path)} holds the same model too"
        notes.append(Note(f"the weights are those of {new.title}; {same}", "same-model"))
    swapped = replace(
        swapped,
        source=program,
        weights=weights.source,
        output=options.target(path) or "",
        unchanged=_is_unchanged(deployed, swapped.program),
        notes=(*notes, *swapped.notes),
    )
    layout = format_of(swapped.program).layout_program(swapped.program)
    if target is None:
        return replace(swapped, cost=cost_of({path: layout}))
    writer.file(layout, target, None if swapped.by_code else swapped.values_json)
    if not options.verify:
        return swapped
    written = _read(target, name, weights, options.out)
    return replace(swapped, verified=writer.prove(target, swapped.program, written))


def _drop_left_over(error: Misfit, weights: Checkpoint, new: Section) -> str:
    """Return the hint with the command that leaves out the keys without a weight."""
    from ckpttool.ruleset.infer_rules import drops

    left_over = [problem.key for problem in error.problems]
    patterns = drops(left_over, new.by_key().keys() - left_over) or ("PATTERN",)
    words = []
    for pattern in patterns:
        words += ["--drop", pattern]
    part = next(outputs(weights.source, "part"))
    command = shell("ckpttool", "remap", weights.source, *words, "-o", part)
    return f"all weights of the program are there; without the other keys: {command}"


def _is_unchanged(before: Checkpoint, after: Checkpoint) -> bool:
    """Return whether all tensors have the values that they had; read up to the first that
    differs.
    """
    for old_section, new_section in zip(before.sections, after.sections):
        for old, new in zip(old_section.tensors, new_section.tensors):
            if old is not new and not same_values(old, new):
                return False
    return True


def _read(path: str, name: str | None, weights: Checkpoint, out: str | None) -> Checkpoint:
    """Return the program in the file. Raises `CkptError` if there is none; the hint says if it is
    `weights` instead.
    """
    kind = recognize(path).format
    if kind.holds.programs:
        return kind.read_program(path, name)
    hint = "PROGRAM is a .pt2 or a TorchScript archive, and comes first"
    if format_of(weights).holds.programs:
        command = shell("ckpttool", "swap-weights", weights.source, path, "-o", out or "OUT.pt2")
        hint = f"the program comes first: {command}"
    raise CkptError(f"{path} is not an exported program: {kind.title}", hint=hint)
