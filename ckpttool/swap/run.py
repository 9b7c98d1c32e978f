"""Swap the weights of a program in a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpttool.containers.pickle_read import collected
from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError, Refused
from ckpttool.core.pickle_imports import dangerous
from ckpttool.core.text import Info, Note, shell
from ckpttool.evaluate.compare import same_values
from ckpttool.formats.opening import not_looked_into
from ckpttool.formats.registry import format_of, is_program, recognize
from ckpttool.io.files import forget_and_check
from ckpttool.naming.convert import ModelForm
from ckpttool.operands.checkpoint import model_section, split
from ckpttool.operands.model import ModelOperand, operand_of
from ckpttool.operands.reading import as_read, read_for_model
from ckpttool.operands.same_model import same_model
from ckpttool.remapping.carried_code import check_code
from ckpttool.remapping.write import Writer, cost_of
from ckpttool.swap.misfit import HINTS, Misfit, hint_to_drop_left_over
from ckpttool.swap.options import SwapOptions
from ckpttool.swap.result import Swap
from ckpttool.swap.swap import swap


def run(program: str, weights: Checkpoint, options: SwapOptions) -> Swap:
    """Put new weights into `program` (``PATH`` or ``PATH::NAME``), and write it if `options` name
    an output.

    Raises `Refused`, with all problems at once, if they do not fit, and `CkptError` if the program
    cannot be read or OUT cannot be written; then nothing is written.
    """
    path, picked = split(program)
    forget_and_check(path)
    name = picked if options.name is None else options.name
    target = None if options.dry_run else options.target(path)
    writer = Writer(path, options)
    if target is not None:
        writer.check_file(target, split(weights.source)[0])
    with collected() as imports:
        deployed = _read(path, name, weights, options.out)
    if not options.keep_pickled_code:
        check_code(deployed, {imported.name for imported in dangerous(imports)})
    model, new = _model_and_section(weights, options)
    try:
        swapped = swap(deployed, new, model, options)
    except Misfit as error:
        error.hint = _hint(error, program, weights, new)
        raise
    if not swapped.sources and all(const.verdict != "from_model" for const in swapped.compared):
        raise Refused(
            f"nothing to swap: no key of {weights.source} is a weight of {path}",
            hint="compare the two: " + shell("ckpttool", "diff", program, weights.source),
        )
    notes = [*weights.notes, *not_looked_into(imports), *_notes(deployed, weights, new, model)]
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


def _model_and_section(
    weights: Checkpoint, options: SwapOptions
) -> tuple[ModelOperand | None, Section]:
    """Return the model that names the weights, and the section with the weights."""
    model = operand_of(options)
    new = model_section(read_for_model(weights, model))
    if model is not None and options.source_form is ModelForm.PRETRAINED:
        return model.by_pretrained, new
    if model is not None and options.source_form is None:
        return as_read(model, new, weights.source), new
    return model, new


def _hint(error: Misfit, program: str, weights: Checkpoint, new: Section) -> str:
    if error.advice == "left_over":
        return hint_to_drop_left_over(error, weights, new)
    if error.advice in ("compare", "model") and not weights.in_memory:
        line = shell("ckpttool", "diff", weights.source, "--model", program)
        return f"{HINTS[error.advice]}; which names and shapes differ: {line}"
    return error.hint


def _notes(
    deployed: Checkpoint, weights: Checkpoint, new: Section, model: ModelOperand | None
) -> Iterator[Note]:
    """Yield notes on constants in the program's code, and on other sections with the same model."""
    if format_of(deployed).holds.code_storages:
        for note in deployed.notes:
            yield Info(f"kept, not compared: {note}", "constants")
    for other in same_model(weights, new, None if model is None else model.names()):
        same = f"{weights.part(other.path)} holds the same model too"
        yield Note(f"the weights are those of {new.title}; {same}", "same-model")


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
    if is_program(weights):
        command = shell("ckpttool", "swap-weights", weights.source, path, "-o", out or "OUT.pt2")
        hint = f"the program comes first: {command}"
    raise CkptError(f"{path} is not an exported program: {kind.title}", hint=hint)
