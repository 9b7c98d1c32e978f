"""`swap_weights` for a file and for an object in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

from ckpttool.core.errors import CkptError
from ckpttool.core.options import expand_options
from ckpttool.core.text import a
from ckpttool.io import progress as io_progress
from ckpttool.io import sources
from ckpttool.operands.checkpoint import Ckpt, open_checkpoint
from ckpttool.swap.options import SwapOptions
from ckpttool.swap.run import run

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.io.progress import Progress
    from ckpttool.keywords import SwapKeywords
    from ckpttool.live.swap import Swappable, Swapped
    from ckpttool.swap.result import Swap


@overload
def swap_weights(
    program: str,
    new: Ckpt,
    out: str | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[SwapKeywords],
) -> Swap: ...


@overload
def swap_weights(
    program: Swappable,
    new: Mapping[str, Any],
    *,
    model: Any = None,
    cast: bool = False,
    constants: bool = False,
    keep_constants: bool = False,
    in_place: bool | None = None,
) -> Swapped: ...


@expand_options(SwapOptions)
def swap_weights(
    program: Any,
    new: Any,
    out: str | None = None,
    *,
    progress: Progress | None = None,
    in_place: bool | None = None,
    **options: Any,
) -> Swap | Swapped:
    """Put new weights into an exported program: a file, or a program, module or compiled package in
    memory.

    Args:
        program: ``PATH`` or ``PATH::NAME`` of a file, or an object in memory.
        new: The weights: anything that `open_checkpoint` takes; for an object in memory a state
            dict.
        out: The path to write the program to; nothing is written without it.
        progress: As for `remap`.
        in_place: Change the object in memory itself; only for objects in memory.
        **options: `model` has the names of the weights. `cast` converts dtypes; `constants`
            replaces constants too, `keep_constants` keeps them.

    Returns:
        What feeds each weight of the program; for an object in memory the new one.

    Raises:
        Refused: The weights do not fit; all problems at once.
        CkptError: Something cannot be read or written.

    Example::

        swap = ckpttool.swap_weights("program.pt2", "good.pt", "swapped.pt2")
        print(len(swap.sources), "weights")
    """
    if isinstance(program, str):
        sources.begin_call()
        if in_place is not None:
            raise CkptError(
                f"{program} is a file: in_place is for objects in memory",
                hint="write another file: -o OUT",
            )
        chosen = SwapOptions(out=out, **options)
        chosen.check()
        with io_progress.shown(progress):
            return run(program, open_checkpoint(new), chosen)
    if out is not None:
        raise CkptError(
            f"{a(program)} is in memory: the swap writes no {out}",
            hint="leave OUT away, or name a file",
        )
    from ckpttool.live import swap_weights as swap_in_memory

    return swap_in_memory(program, new, in_place=in_place, **options)
