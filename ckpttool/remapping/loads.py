"""Check that the model which will load the output of a remap does load it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused, same_problem
from ckpttool.core.names import RUNTIME, SERIALIZED
from ckpttool.core.tables import without_tensors
from ckpttool.core.text import Info, dotted, plural, shell, some
from ckpttool.core.values import dataclass
from ckpttool.distributed.job import current
from ckpttool.kinds.adapters import Adapter, adapter_in, missing_modules
from ckpttool.naming import wrappers
from ckpttool.naming.convert import ModelForm, Reading, read_keys
from ckpttool.naming.match import NameTables, match
from ckpttool.naming.wrappers import stripped_paths
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.reading import as_read
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.result import Remap

if TYPE_CHECKING:
    from ckpttool.tracing.loading import Verdict


_SIZE_MISMATCH = "size mismatch for "


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """How a model loads the output. `missing` keys and other `problems` make a strict load fail;
    `notes` do not. `adds_names` is the command that adds the missing names, if all of them are
    second names of tensors that are there.
    """

    model: str
    missing: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    adds_names: str = ""

    def check(self, partial: bool) -> None:
        """Raise `Refused` with all problems; with `partial`, keys may be missing."""
        missing = () if partial else self.missing
        if self.problems:
            count = len(self.problems) + len(missing)
            raise Refused(
                f"{self.model} would not load the output: {plural(count, 'problem')}",
                hint="rename keys with --rule 'FROM => TO', leave them out with --drop PATTERN"
                " (which loses their effect on the model's output), or name the model that the"
                " output is for (--to-model)",
                problems=[*self.problems, *(Problem("missing", key, "missing") for key in missing)],
            )
        if missing:
            hint = (
                "add --partial to write it without them (an encoder, an average of the parameters"
                " alone)"
            )
            if self.adds_names:
                hint = f"{hint}; then add these second names: {self.adds_names}"
            raise Refused(
                f"the output would lack {plural(len(missing), 'key')} of {self.model}: "
                "a strict load fails without them",
                hint=hint,
                problems=same_problem("missing", missing, "missing"),
            )


def loaded_by(
    options: RemapOptions, model: ModelOperand | None, to_model: ModelOperand | None
) -> ModelOperand | None:
    """Return the model that will load the output: `--to-model`, or `--model` unless an option leads
    to other names.
    """
    if options.to_model is not None:
        return to_model
    form = options.form
    about_keys = (
        options.to,
        options.from_,
        options.drop,
        options.sections,
        options.trainable_only or None,
    )
    about_optimizers = options.optimizer_keys is not None or to_model is not None
    if about_optimizers and all(option is None for option in about_keys):
        return None  # the model is named for its optimizer, and the keys stay as they are
    other_names = options.has_rules or options.select is not None or options.like is not None
    if model is None or other_names or (isinstance(form, ModelForm) and form.names == RUNTIME):
        return None
    return model


def how_model_loads(
    outcome: Remap, options: RemapOptions, model: ModelOperand | None
) -> LoadAnswer | None:
    """Return how `model` loads the state dicts that the remap changed; None if it is not asked.

    torch answers for the model's code; for a list of names, keys and shapes decide.
    Wrappers in the keys are left aside. A key that `--drop` or `--trainable-only` leaves out on
    purpose is not missing.
    """
    if model is None:
        return None
    missing = dict.fromkeys(outcome.missing)
    problems: list[Problem] = []
    notes: list[str] = []
    lacks_names = not missing
    for path in outcome.model_paths:
        section = outcome.result.section(path)
        adapter = adapter_in(section)
        if adapter is not None:
            problems += _modules_without_place(adapter, model)
            continue
        by_code = model if options.form is not ModelForm.PRETRAINED else model.by_pretrained
        if model.is_folder:
            by_code = as_read(model, section, outcome.result.source)
        left_out = _left_out(outcome, path, by_code)
        is_incomplete = options.partial or options.trainable_only or bool(left_out)
        answer = _how_model_loads_section(section, by_code, options, is_incomplete)
        keys = [key for key in answer.missing if key not in left_out]
        missing.update(dict.fromkeys(dotted(path, key) for key in keys))
        lacks_names = lacks_names and _are_second_names(keys, section, by_code)
        problems += [replace(problem, key=dotted(path, problem.key)) for problem in answer.problems]
        notes += answer.notes
    if options.trainable_only:
        missing = dict.fromkeys(outcome.missing)
    line = shell("ckpttool", "remap", "OUT", *model.words, "--to", SERIALIZED, "-o", "NEW")
    return LoadAnswer(
        model.title,
        tuple(missing),
        tuple(problems),
        tuple(dict.fromkeys(notes)),
        line if lacks_names else "",
    )


def _modules_without_place(adapter: Adapter, model: ModelOperand) -> list[Problem]:
    """Return a problem for each module of an adapter that the model does not have."""
    if not adapter.alone:
        return []
    names = {*model.tables.serialized_names, *model.tables.runtime_names}
    missing = missing_modules(adapter, names)
    return same_problem("not a module of this model", missing)


def _are_second_names(keys: Sequence[str], section: Section, model: ModelOperand) -> bool:
    """Return whether the section has the tensors of the keys under other names."""
    saved = model.tables.saved
    names = read_keys(model.tables, section, SERIALIZED).match.names.values()
    present = {saved[name] for name in names if saved.get(name) is not None}
    return all(saved.get(key) in present for key in keys)


def _left_out(outcome: Remap, path: str, model: ModelOperand) -> set[str]:
    """Return the names of the model that the user left out of a section."""
    dropped = [drop.key for drop in outcome.plan.dropped if drop.section == path]
    by_name = match(dropped, model.tables.serialized_names).names
    return {*dropped, *by_name.values()}


def _how_model_loads_section(
    section: Section, model: ModelOperand, options: RemapOptions, is_incomplete: bool
) -> LoadAnswer:
    """Return how the model loads a section, by its code if that can tell, else by its names.

    `is_incomplete`: the user leaves keys out, so hooks of the model may fail.
    """
    form = options.form
    runtime = isinstance(form, ModelForm) and form.names == RUNTIME
    section = _without_counters(section, model)
    reading = read_keys(model.tables, section, RUNTIME if runtime else SERIALIZED)
    bare = _without_wrappers(section, reading, model.tables)
    if runtime or not model.is_definition or not model.names().roundtrips:
        return _by_names(bare, model, reading.form)
    job = current()
    if job is not None and not job.is_first:
        return LoadAnswer(model.title)  # the first rank runs the model's code, and fails for all
    try:
        verdict = model.verdict(bare, reads_values=False)
    except CkptError as error:
        by_names = _by_names(bare, model, reading.form)
        note = Info(
            f"torch was not asked whether {model.title} loads the output: {error.message}",
            "not-compared",
        )
        return replace(by_names, notes=(*by_names.notes, note))
    return _by_verdict(bare, model, verdict, is_incomplete)


def _without_counters(section: Section, model: ModelOperand) -> Section:
    """Return the section without the counters of AveragedModels, unless they are the model's
    own.
    """
    keys = section.tensor_keys
    counters = set(wrappers.counters(keys)).difference(model.tables.serialized_names)
    if not counters:
        return section
    return without_tensors(section, counters)


def _without_wrappers(section: Section, reading: Reading, tables: NameTables) -> Section:
    """Return the section under the model's own names, if a wrapped model has its keys.

    A key stays as it is if another key has the same name, or if it is inside of a wrapper that
    other keys next to it are not in: no model loads both ``a.weight`` and ``module.a.bias``.
    """
    if not reading.match.wrapped:
        return section
    names = reading.match.names
    count = Counter(names.values())
    canonical = tables.canonical_names(reading.form)
    paths = stripped_paths((key, canonical[name]) for key, name in names.items())
    half_wrapped = _half_wrapped(section.keys, paths)
    new_keys = {}
    for key, name in names.items():
        if count[name] == 1 and not key.startswith(half_wrapped):
            new_keys[key] = name
    tensors = tuple(entry.under(new_keys.get(entry.key, entry.key)) for entry in section.tensors)
    extras = tuple(entry.under(new_keys.get(entry.key, entry.key)) for entry in section.extras)
    return replace(section, tensors=tensors, extras=extras)


def _half_wrapped(keys: Sequence[str], paths: Iterable[str]) -> tuple[str, ...]:
    """Return the prefixes of the wrappers at these paths that do not have all keys below the module
    around them.
    """
    count = Counter({"": len(keys)})  # module path -> keys below it
    for key in keys:
        segments = key.split(".")
        for depth in range(1, len(segments)):
            count[".".join(segments[:depth])] += 1
    prefixes = []
    for path in paths:
        parent, _, _ = path.rpartition(".")
        if 0 < count[path] < count[parent]:
            prefixes.append(f"{path}.")
    return tuple(prefixes)


def _by_verdict(
    section: Section, model: ModelOperand, verdict: Verdict, is_incomplete: bool
) -> LoadAnswer:
    problems = same_problem("not a key that the model loads", verdict.unexpected, "unexpected")
    problems += _wrong_shapes(section, model)
    shown = {problem.key for problem in problems}
    notes = []
    for text in verdict.errors:
        key = (
            text.removeprefix(_SIZE_MISMATCH).partition(":")[0]
            if text.startswith(_SIZE_MISMATCH)
            else ""
        )
        if not key and is_incomplete:
            notes.append(Info(f"torch does not load the output as it is: {text}", "torch-error"))
        elif key not in shown:
            problems.append(Problem(f"torch: {text}", key))
    if verdict.ok and verdict.dtype_changes:
        changed = [
            f"{change.fqn} ({change.source} to {change.target})" for change in verdict.dtype_changes
        ]
        text = f"loading the output converts {plural(len(changed), 'tensor')}: {some(changed)}"
        notes.append(Info(text, "converts"))
    return LoadAnswer(model.title, verdict.missing, tuple(problems), tuple(notes))


def _by_names(bare: Section, model: ModelOperand, form: str) -> LoadAnswer:
    """Return what the names say: unknown keys, and tensors of another shape.

    ``state_dict()`` has all serialized names, and a strict load wants all of them; of the runtime
    names, some may be absent.
    """
    tables = model.tables
    names = tables.canonical_names(form)
    optional = set() if form == SERIALIZED else set(tables.spare_fqns)
    unexpected = [key for key in bare.keys if key not in names]
    problems = same_problem("not a key that the model loads", unexpected, "unexpected")
    for entry in bare.tensors:
        shape = tables.shape_of(entry.key, form)
        if shape is not None and shape != entry.shape:
            problems.append(_wrong_shape(entry, shape))
    optional.update(bare.keys)
    missing = tuple(name for name in names if name not in optional)
    return LoadAnswer(model.title, missing, tuple(problems))


def _wrong_shapes(section: Section, model: ModelOperand) -> Iterator[Problem]:
    for entry in section.tensors:
        shape = model.tables.shape_of(entry.key, SERIALIZED)
        if shape is not None and shape != entry.shape:
            yield _wrong_shape(entry, shape)


def _wrong_shape(entry: TensorEntry, shape: Sequence[int]) -> Problem:
    return Problem(f"shape {list(entry.shape)} instead of {list(shape)}", entry.key, "shape")
