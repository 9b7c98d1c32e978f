"""ckpttool: inspects, diffs and converts PyTorch checkpoints. The verbs of the command line, as functions."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # `typing` takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

    from ckpttool.api.comparing import check, diff, since, steps
    from ckpttool.api.making import remap, swap_weights, undo, write
    from ckpttool.api.reading import explain, inspect, manifest, open_checkpoint, trace
    from ckpttool.checks import Checks
    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.core.errors import CkptError, Problem, Refused
    from ckpttool.core.names import Names
    from ckpttool.core.plan import Plan
    from ckpttool.diffing.history import Steps
    from ckpttool.diffing.result import Diff
    from ckpttool.diffing.three_way import Since
    from ckpttool.inspection.explain import Explanation
    from ckpttool.inspection.inspect import Inspection
    from ckpttool.live.swap import Swapped
    from ckpttool.remapping.plan import Remap
    from ckpttool.remapping.undo import Undone
    from ckpttool.swap.swap import Swap

    __version__: str

__all__ = [
    "Checkpoint",
    "Checks",
    "CkptError",
    "Diff",
    "Explanation",
    "Inspection",
    "Names",
    "Plan",
    "Problem",
    "Refused",
    "Remap",
    "Since",
    "Steps",
    "Swap",
    "Swapped",
    "Undone",
    "check",
    "diff",
    "explain",
    "inspect",
    "manifest",
    "open_checkpoint",
    "remap",
    "since",
    "steps",
    "swap_weights",
    "trace",
    "undo",
    "write",
]

# Where the values and the verbs come from. Imported when they are asked for: nothing here costs start-up.
_HOMES = {
    "Checkpoint": "core.checkpoint",
    "Checks": "checks",
    "CkptError": "core.errors",
    "Diff": "diffing.result",
    "Explanation": "inspection.explain",
    "Inspection": "inspection.inspect",
    "Names": "core.names",
    "Plan": "core.plan",
    "Problem": "core.errors",
    "Refused": "core.errors",
    "Remap": "remapping.plan",
    "Since": "diffing.three_way",
    "Steps": "diffing.history",
    "Swap": "swap.swap",
    "Swapped": "live.swap",
    "Undone": "remapping.undo",
    **dict.fromkeys(("check", "diff", "since", "steps"), "api.comparing"),
    **dict.fromkeys(("remap", "swap_weights", "undo", "write"), "api.making"),
    **dict.fromkeys(("explain", "inspect", "manifest", "open_checkpoint", "trace"), "api.reading"),
}


if not TYPE_CHECKING:  # a type checker would take every name for one of the package

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return _version()
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"ckpttool.{_HOMES[name]}"), name)


def _version() -> str:
    """That of the installed distribution; of files that nobody has installed none is known."""
    from importlib.metadata import PackageNotFoundError, version  # takes as long as all the rest

    try:
        return version("ckpttool")
    except PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
