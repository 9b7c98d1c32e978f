"""Files of several ranks in ``remap``: the options about them, reading them as one checkpoint, writing one for each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ckpttool.checkpoint import Checkpoint
from ckpttool.cli.writing import Wanted, prove, write_files
from ckpttool.errors import CkptError
from ckpttool.formats.table import FORMATS
from ckpttool.io import sources, write_file
from ckpttool.io.files import files_of, is_dir, names_in
from ckpttool.io.paths import join, parent
from ckpttool.io.paths import name as name_of
from ckpttool.names import FSDP_FLAT, Names

if TYPE_CHECKING:
    from ckpttool.edits.ranks.gather import Gathered

PLACE = "{rank}"  # in OUT, for the number of the rank

Units = Annotated[
    list[str] | None,
    typer.Option("--units", metavar="MODULES", help="Modules with flat parameters of their own: 'layers.*'."),
]
WorldSize = Annotated[
    int | None, typer.Option("--world-size", metavar="N", help=f"How many rank files --to {FSDP_FLAT} writes.")
]


def check(
    to: str | None, model: str | None, world_size: int | None, units: Sequence[str] | None, out: str | None
) -> None:
    """Raises `CkptError` for options about ranks that do not go together."""
    if to != FSDP_FLAT:
        if world_size is not None:
            raise CkptError(f"--world-size is for --to {FSDP_FLAT}", hint=f"pass --to {FSDP_FLAT} too")
        if units and model is None:
            raise CkptError("--units needs the model's modules", hint="pass --model MODEL")
        return
    if model is None or world_size is None:
        raise CkptError(
            f"--to {FSDP_FLAT} needs the model's parameters and the number of ranks",
            hint="pass --model MODEL --world-size N, and the modules that are wrapped as in --units 'layers.*'",
        )
    if out is not None and (PLACE not in name_of(out) or FORMATS["torch_zip"].endings[0] != out[-3:]):
        raise CkptError(f"{out}: every rank gets a file of its own", hint="name them as in -o 'rank_{rank}.pt'")


def put_together(
    source: Checkpoint, names: Names | None, units: Sequence[str] | None, to: str | None, saves_plan: bool
) -> Gathered | None:
    """The source with flat parameters and parts of tensors made whole; None where it has none.

    Raises `CkptError` where that cannot be, or where `units` has nothing to say.
    """
    from ckpttool.edits.ranks.gather import gather, needs_gathering, without_model

    if not needs_gathering(source):
        if units and to != FSDP_FLAT:
            raise CkptError(f"{source.source} holds no flat parameters", hint="leave --units out")
        return None
    if names is None:
        if source.format == "rank_files":
            raise without_model(source)
        return None
    if saves_plan:
        raise CkptError("a plan cannot put rank files together", hint="write the checkpoint: -o OUT, without a plan")
    return gather(source, names, units or ())


def write_ranks(ranks: Sequence[Checkpoint], out: str, how: Wanted) -> None:
    """Writes the files of all ranks or none, in place of those of other ranks under the same names.

    Raises `CkptError` where one of these is a source, or exists and is not to be overwritten.
    """
    folder, pattern = parent(out), name_of(out)
    names = [pattern.replace(PLACE, str(rank)) for rank in range(len(ranks))]
    layouts = [FORMATS["torch_zip"].layout(rank) for rank in ranks]
    stale = _of_ranks(folder, pattern).difference(names)
    _check_ranks(folder, [*names, *sorted(stale)], how)
    write_files(dict(zip(names, layouts)), folder, how, stale=stale, whole=False)
    if how.verify:
        for name, rank in zip(names, ranks):
            prove(join(folder, name), rank)


def _of_ranks(folder: str, pattern: str) -> set[str]:
    """The files in the folder that would be taken for those of ranks too."""
    number = r"\d+".join(map(re.escape, pattern.split(PLACE)))
    return {name for name in names_in(folder) if re.fullmatch(number, name)} if is_dir(folder) else set()


def _check_ranks(folder: str, names: Sequence[str], how: Wanted) -> None:
    read = (*files_of(how.source), *sources.files_read())
    for name in names:
        write_file.preflight(join(folder, name), read, force=how.force, in_place=False)
