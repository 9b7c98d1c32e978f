"""The whole of `swap-weights`: the program and the new weights are read, planned together, and written."""

from __future__ import annotations

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits.swap.options import SwapOptions
from ckpttool.edits.swap.swap import Swap, swap
from ckpttool.edits.write import Progress, Writer, prove, quiet
from ckpttool.errors import CkptError
from ckpttool.evaluate.compare import fingerprints
from ckpttool.formats.pt2.archive import read_program
from ckpttool.formats.recognise_file import sniff
from ckpttool.formats.table import FORMATS
from ckpttool.naming.model_form import ModelForm
from ckpttool.operands.checkpoint import model_section, split
from ckpttool.operands.model import operand_of
from ckpttool.words import shell


def run(program: str, weights: Checkpoint, options: SwapOptions, progress: Progress = quiet) -> Swap:
    """`program` (``PATH`` or ``PATH::NAME``) with new weights, written where `options` name an output.

    Raises `Refused`, all problems at once, where they do not fit, and `CkptError` where the program cannot be read or
    OUT not be written; then nothing is.
    """
    path, picked = split(program)
    name = picked if options.name is None else options.name
    target = None if options.dry_run else options.target(path)
    fsync = not options.no_fsync
    writer = Writer(path, options.force, options.in_place, fsync, options.verify, progress=progress)
    if target is not None:
        writer.check_file(target, split(weights.source)[0])
    found = sniff(path)
    if found != "pt2":
        raise CkptError(
            f"{path} is no exported program: {FORMATS[found].title}", hint=_program_first(program, weights, options.out)
        )
    deployed = read_program(path, name)
    model = operand_of(options)
    swapped = swap(
        deployed,
        model_section(weights),
        None if model is None else model.names(),
        form=None if options.from_ is None else ModelForm(options.from_).names,
        cast=options.cast,
        constants=options.constants,
        code=model if model is not None and model.is_definition else None,
    )
    if target is not None:
        expected = fingerprints(swapped.program) if options.verify and options.in_place else swapped.program
        writer.file(FORMATS["pt2"].layout(swapped.program), target)
        if options.verify:
            prove(target, expected, read_program(target, name))
    return swapped


def _program_first(program: str, weights: Checkpoint, out: str | None) -> str:
    if weights.format != "pt2":
        return "PROGRAM is a .pt2, and comes first"
    return (
        f"the program comes first: {shell('ckpttool', 'swap-weights', weights.source, program, '-o', out or 'OUT.pt2')}"
    )
