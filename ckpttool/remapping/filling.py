"""Take what the result of a remap lacks from other checkpoints, or from a new model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Payload, Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import refs
from ckpttool.core.options import call_of
from ckpttool.core.plan import Plan
from ckpttool.core.text import Note, dotted, plural
from ckpttool.core.values import dataclass
from ckpttool.naming.convert import read_keys
from ckpttool.naming.match import align, match
from ckpttool.naming.wrappers import canonical_keys
from ckpttool.operands.checkpoint import is_code, model_section, open_checkpoint
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.reading import read_for_model
from ckpttool.optimizers.key_order import keys_in_model_order
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.plan import remap as remap_index
from ckpttool.remapping.result import Filled, Remap
from ckpttool.remapping.steps import Request, notes_on_like
from ckpttool.remapping.through_models import names_for_load


@dataclass(frozen=True, slots=True)
class Filler:
    """A checkpoint that has missing keys. `title` is what the user calls it."""

    title: str
    checkpoint: Checkpoint


def filler_of(operand: Any) -> Filler:
    """Open the checkpoint; of a model or its code, take the values that the code gives it. Raise
    `CkptError` if it cannot be read.
    """
    if isinstance(operand, str) and not is_code(call_of(operand)[0]):
        return Filler(operand, open_checkpoint(operand))
    if isinstance(operand, (Checkpoint, Mapping)):
        checkpoint = open_checkpoint(operand)
        return Filler(checkpoint.source, checkpoint)
    from ckpttool.tracing.user_code import user_code

    model = ModelOperand(operand, materialize=True, option="--fill-from")
    instance = model.definition().build(True)
    with user_code(f"{model.title}.state_dict() fails"):
        state = instance.state_dict()
    return Filler(model.title, open_checkpoint(dict(state)))


def fill(
    outcome: Remap, fillers: Sequence[Filler], request: Request, model: ModelOperand | None
) -> Remap:
    """Return the result with the missing keys of `model`, whose names it has, or of `--like`: each
    from the first filler that has it. Raise `Refused` if one cannot be brought to these names.
    """
    sections = {section.path: section for section in outcome.result.sections}
    files = dict(outcome.result.files)
    filled = []
    taken: set[str] = set()
    notes = [*outcome.notes]
    for filler in fillers:
        offer = _under_final_names(filler, request, model)
        files.update(filler.checkpoint.files)
        keys: list[str] = []
        unused = set(offer)
        for path in outcome.model_paths:
            names = [name for name in _lacking(sections[path], request, model) if name in offer]
            if request.rule_steps and model is request.saved:
                _check_not_renamed(outcome.plan, path, names)
            entries = [offer[name] for name in names]
            sections[path] = _with_entries(sections[path], entries, request, model)
            keys += [dotted(path, name) for name in names]
            unused.difference_update(names)
        filled.append(Filled(filler.title, tuple(keys), len(unused)))
        taken.update(keys)
        if not keys:
            text = f"{filler.title} has no key that is missing: nothing is taken from it"
            notes.append(Note(text, "remap"))
    if request.like is not None:
        written: list[str] = []
        for path in outcome.model_paths:
            written += sections[path].keys
        notes += notes_on_like(written, request.like)
    return replace(
        outcome,
        result=replace(outcome.result, sections=tuple(sections.values()), files=files),
        missing=tuple(key for key in outcome.missing if key not in taken),
        filled=tuple(filled),
        notes=tuple(notes),
    )


def _check_not_renamed(plan: Plan, path: str, names: Sequence[str]) -> None:
    """Raise `Refused` if rules gave the tensors of these names other names: they are in the result
    already.
    """
    new_names: dict[str, str] = {}
    for output in plan.outputs:
        if output.section == path and not output.is_unchanged:
            new_names.update(dict.fromkeys(refs(output.source), output.key))
    renamed = {old: new_names[key] for key, old in canonical_keys(new_names).items()}
    problems = []
    for key, name in canonical_keys(names).items():
        if name in renamed:
            problems.append(Problem(f"is {renamed[name]} in the output", key))
    if problems:
        raise Refused(
            f"--fill-from would add {plural(len(problems), 'tensor')} a second time: rules gave"
            " them other names",
            hint="name the model that loads the output: --to-model NEW",
            problems=problems,
        )


def _lacking(section: Section, request: Request, model: ModelOperand | None) -> list[str]:
    """Return the names that the section lacks: of the model that will load it, or of `--like`."""
    if model is not None:
        return list(match(section.keys, *names_for_load(model.tables, request.model_form)).missing)
    assert request.like is not None
    present = align(section.keys, request.like.by_key()).values()
    return [key for key in request.like.keys if key not in present]


def _under_final_names(
    filler: Filler, request: Request, model: ModelOperand | None
) -> dict[str, TensorEntry]:
    """Return the tensors of the filler by the names that the model, or `--like`, has for them, with
    the keys that the result gives them; without tensors that it does not have.
    """
    try:
        section = model_section(read_for_model(filler.checkpoint, model))
        if model is not None:
            return _under_names_of_model(filler, section, model, request)
        assert request.like is not None
        wanted = align(section.keys, request.like.by_key())
        steps = Request(RemapOptions(), "", like=request.like)
        renamed = _renamed(filler, section, wanted, steps)
        return {entry.key: entry for entry in renamed}
    except CkptError as error:
        error.message = f"--fill-from {filler.title}: {error.message}"
        raise


def _under_names_of_model(
    filler: Filler, section: Section, model: ModelOperand, request: Request
) -> dict[str, TensorEntry]:
    wanted = read_keys(model.tables, section).match.names
    steps = Request(RemapOptions(to=request.options.to), "", saved=model)
    entries = _renamed(filler, section, wanted, steps)
    keys = [entry.key for entry in entries]
    names = match(keys, *names_for_load(model.tables, request.model_form)).names
    return {names[entry.key]: entry for entry in entries if entry.key in names}


def _renamed(
    filler: Filler, section: Section, wanted: Mapping[str, str], steps: Request
) -> tuple[TensorEntry, ...]:
    """Return the wanted tensors of a filler's section after the steps."""
    tensors = tuple(entry for entry in section.tensors if entry.key in wanted)
    if not tensors:
        return ()
    part = replace(section, path="", tensors=tensors, extras=())
    (result,) = remap_index(Checkpoint.of(part), steps).result.sections
    _check_dense(filler, result)
    return result.tensors


def _check_dense(filler: Filler, section: Section) -> None:
    """Raise `Refused` for tensors that only a file of the same format can hold."""
    problems = []
    for entry in section.tensors:
        if entry.storage is None:
            problems.append(Problem(f"not a dense tensor ({entry.layout})", entry.key))
    if problems:
        raise Refused(
            f"{plural(len(problems), 'tensor')} of {filler.title} cannot be taken",
            hint="--fill-from takes dense tensors",
            problems=problems,
        )


def _with_entries(
    section: Section, added: Sequence[TensorEntry], request: Request, model: ModelOperand | None
) -> Section:
    """Return the section with more tensors, which are plain ones in any format. Each comes after
    the key that is before it in the model's ``state_dict()``, or in `--like`: the order of keys is
    evidence for the ids of optimizers.

    section  d b    added  c    model  a b c d    result  d b c
    """
    plain: dict[str, TensorEntry] = {}
    for entry in added:
        if isinstance(entry.payload, Payload):
            entry = entry.payload.resolved(entry)
        plain[entry.key] = replace(entry, payload=None)
    complete = replace(section, tensors=(*section.tensors, *plain.values()))
    following: dict[str, list[TensorEntry]] = {}  # by the key before them
    before = ""
    for key in _expected_order(complete, request, model):
        if key in plain:
            following.setdefault(before, []).append(plain.pop(key))
        else:
            before = key
    tensors = following.get("", [])
    for entry in section.tensors:
        tensors += [entry, *following.get(entry.key, ())]
    return replace(section, tensors=(*tensors, *plain.values()))


def _expected_order(section: Section, request: Request, model: ModelOperand | None) -> list[str]:
    """Return the section's keys in the order of the model that will load it, or of `--like`."""
    if model is not None:
        return keys_in_model_order(section, model.names())
    assert request.like is not None
    name_of = align(section.keys, request.like.by_key())
    key_of = {name: key for key, name in name_of.items()}
    return [key_of[name] for name in request.like.keys if name in key_of]
