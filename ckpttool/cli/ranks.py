"""Files of several ranks in ``remap``: the options about them, reading them as one checkpoint, writing one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ckpttool.checkpoint import Checkpoint
from ckpttool.cli.writing import prove, write
from ckpttool.errors import CkptError
from ckpttool.formats.table import FORMATS
from ckpttool.io import write_file
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
    if out is not None and (PLACE not in out or FORMATS["torch_zip"].endings[0] != out[-3:]):
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


def write_ranks(ranks: Sequence[Checkpoint], out: str, *, force: bool, fsync: bool, verify: bool) -> None:
    """Writes the file of each rank; all outputs are checked before the first is written."""
    paths = [out.replace(PLACE, str(rank)) for rank in range(len(ranks))]
    layouts = [FORMATS["torch_zip"].layout(rank) for rank in ranks]
    for path, rank in zip(paths, ranks):
        write_file.preflight(path, [rank.source], force=force, in_place=False)
    for path, pieces, rank in zip(paths, layouts, ranks):
        write(pieces, path, fsync=fsync)
        if verify:
            prove(path, rank)
