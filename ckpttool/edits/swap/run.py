"""The whole of `swap-weights`: the program and the new weights are read, planned together, and written."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits.cost import cost_of
from ckpttool.edits.pickled_code import check_code
from ckpttool.edits.swap.options import SwapOptions
from ckpttool.edits.swap.swap import Swap, swap
from ckpttool.edits.undo import undo_of
from ckpttool.edits.write import Writer
from ckpttool.errors import CkptError, Refused
from ckpttool.evaluate.compare import fingerprints, same_values
from ckpttool.formats.containers.pickle_tree import collected
from ckpttool.formats.pt2.archive import read_program, read_scripted
from ckpttool.formats.recognise_file import sniff
from ckpttool.formats.table import FORMATS
from ckpttool.imports import dangerous
from ckpttool.io.files import look_anew, size
from ckpttool.naming.model_form import ModelForm
from ckpttool.operands.checkpoint import model_section, split
from ckpttool.operands.model import as_read, operand_of
from ckpttool.operands.sections import read_for_model
from ckpttool.words import shell


def run(program: str, weights: Checkpoint, options: SwapOptions) -> Swap:
    """`program` (``PATH`` or ``PATH::NAME``) with new weights, written where `options` name an output.

    Raises `Refused`, all problems at once, where they do not fit, and `CkptError` where the program cannot be read or
    OUT not be written; then nothing is.
    """
    path, picked = split(program)
    look_anew(path)
    name = picked if options.name is None else options.name
    target = None if options.dry_run else options.target(path)
    fsync = not options.no_fsync
    writer = Writer(path, options.force, options.in_place, fsync, options.verify, keep=not options.no_undo)
    if target is not None:
        writer.check_file(target, split(weights.source)[0])
    with collected() as imports:
        deployed = _read(path, name, weights, options.out)
    if not options.keep_pickled_code:
        check_code(deployed, {one.name for one in dangerous(imports)})
    model = operand_of(options)
    new = model_section(read_for_model(weights, model))
    if model is not None and options.source_form is ModelForm.PRETRAINED:
        model = model.by_pretrained
    elif model is not None and options.source_form is None:
        model = as_read(model, new, weights.source)
    swapped = swap(
        deployed,
        new,
        None if model is None else model.names(),
        form=options.source_form,
        cast=options.cast,
        constants=options.constants,
        keep_constants=options.keep_constants,
        code=model if model is not None and model.is_definition else None,
    )
    if not swapped.sources and all(one.verdict != "from_model" for one in swapped.compared):
        raise Refused(
            f"nothing to swap: no key of {weights.source} is a weight of {path}",
            hint="compare the two: " + shell("ckpttool", "diff", program, weights.source),
        )
    swapped = replace(swapped, source=program, weights=weights.source, output=options.target(path) or "")
    swapped = replace(swapped, unchanged=_same(deployed, swapped.program))
    if options.in_place and not options.no_undo:
        swapped = replace(swapped, undo=undo_of(path, size(path)))
    if target is None:
        return replace(swapped, cost=cost_of({path: FORMATS["pt2"].layout(swapped.program)}))
    expected = fingerprints(swapped.program) if options.verify and options.in_place else swapped.program
    writer.file(FORMATS["pt2"].layout(swapped.program), target, None if swapped.by_code else swapped.values_json)
    if options.verify:
        swapped = replace(swapped, verified=writer.prove(target, expected, _read(target, name, weights, options.out)))
    return swapped


def _same(before: Checkpoint, after: Checkpoint) -> bool:
    """Whether the program has all the values that it had; reads up to the first that differs."""
    pairs = (
        (old, new)
        for left, right in zip(before.sections, after.sections)
        for old, new in zip(left.tensors, right.tensors)
        if old is not new
    )
    return all(same_values(old, new) for old, new in pairs)


def _read(path: str, name: str | None, weights: Checkpoint, out: str | None) -> Checkpoint:
    """The program in the file. Raises `CkptError` where it holds none, and where that may be in `weights`."""
    found = sniff(path)
    if found == "pt2":
        return read_program(path, name)
    if found == "torchscript" and name is None:
        return read_scripted(path)
    if found == "torchscript":
        raise CkptError(f"{path} holds one program without a name: {FORMATS[found].title}", hint=f"name {path} alone")
    hint = "PROGRAM is a .pt2 or a TorchScript archive, and comes first"
    if weights.format in ("pt2", "torchscript"):
        command = shell("ckpttool", "swap-weights", weights.source, path, "-o", out or "OUT.pt2")
        hint = f"the program comes first: {command}"
    raise CkptError(f"{path} is no exported program: {FORMATS[found].title}", hint=hint)
