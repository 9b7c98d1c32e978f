"""``ckpttool swap-weights``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from ckpttool.cli.options import Materialize, Model, ModelKwargs
from ckpttool.cli.output import Force, Format, Reports, check_texts, emit
from ckpttool.cli.writing import DryRun, NoFsync, Out, Verify, Wanted, prove, write
from ckpttool.edits.remap.plan import FORMS
from ckpttool.edits.swap.swap import swap, to_json
from ckpttool.errors import CkptError
from ckpttool.evaluate.compare import fingerprints
from ckpttool.formats.pt2.archive import read_program
from ckpttool.formats.recognise_file import sniff
from ckpttool.formats.table import FORMATS
from ckpttool.io import write_file
from ckpttool.io.files import files_of
from ckpttool.operands.checkpoint import model_section, open_operand, split
from ckpttool.operands.model import ModelOperand, parse_kwargs


def command(
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="The exported program (.pt2).")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The checkpoint with the new weights.")],
    out: Out = None,
    name: Annotated[
        str | None, typer.Option("--program", metavar="NAME", help="Which one, where PROGRAM holds several.")
    ] = None,
    model: Model = None,
    model_kwargs: ModelKwargs = "{}",
    materialize: Materialize = False,
    was: Annotated[str | None, typer.Option("--from", metavar="FORM", help="NEW's form; default: recognised.")] = None,
    cast: Annotated[bool, typer.Option("--cast", help="Convert weights of another dtype to the program's.")] = False,
    constants: Annotated[
        bool, typer.Option("--constants", help="Swap constants too: lifted tensors and non-persistent buffers in NEW.")
    ] = False,
    in_place: Annotated[bool, typer.Option("--in-place", help="Replace PROGRAM itself, atomically.")] = False,
    force: Force = False,
    dry_run: DryRun = False,
    verify: Verify = False,
    no_fsync: NoFsync = False,
    format: Format = "text",
    report: Reports = None,
) -> None:
    """Put new weights into an exported program.

    The graph is not read, so the machine needs neither the program's custom operators nor its torch version. Refused,
    with nothing written: weights that are missing, left over, of another shape or dtype, or tied and different.
    """
    from ckpttool.report.documents.swap import document

    if in_place == (out is not None) and not dry_run:
        raise CkptError(
            "no output named" if not in_place else "--in-place and -o OUT exclude each other", hint="-o OUT"
        )
    if was is not None and was not in FORMS:
        raise CkptError(f"--from {was}: no such form", hint=f"the forms are {', '.join(FORMS)}")
    path, picked = split(program)
    name = picked if name is None else name
    target = path if in_place else out
    if target is not None and not dry_run:
        write_file.preflight(target, [path, split(new)[0], *files_of(split(new)[0])], force=force, in_place=in_place)
    found = sniff(path)
    if found != "pt2":
        raise CkptError(f"{path} is no exported program: {FORMATS[found].title}", hint="PROGRAM is a .pt2")
    deployed = read_program(path, name)
    weights = model_section(open_operand(new))
    names = None if model is None else ModelOperand(model, parse_kwargs(model_kwargs), materialize).names()
    swapped = swap(deployed, weights, names, form=None if was is None else FORMS[was], cast=cast, constants=constants)
    pieces = FORMATS["pt2"].layout(swapped.program)
    check_texts(report or (), target)
    if target is not None and not dry_run:
        expected = fingerprints(swapped.program) if verify and in_place else swapped.program
        write(pieces, target, Wanted(path, force, in_place, not no_fsync, verify))
        if verify:
            prove(target, expected, read_program(target, name))
    data = to_json(swapped, program, new, target or "")
    shown = partial(document, swapped, program, new, target, dry_run=dry_run, verified=verify)
    emit(shown, lambda: data, format, report, force=force)
