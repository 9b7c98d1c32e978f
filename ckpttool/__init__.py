"""Inspect, diff and convert PyTorch checkpoints.

The functions are the commands of the command line, with the same options as keywords:

inspect(ckpt)                      what is in a checkpoint; `print` shows the report
diff(left, right)                  what differs between two checkpoints, and what fixes it
diff(ckpt, model=model)            whether the model loads the checkpoint, or why not
fix(ckpt, out, model=model)        apply the fix
remap(ckpt, out, rule="a => b")    rename keys, convert optimizer state
convert(ckpt, out)                 another format or dtype
swap_weights(program, new, out)    new weights in an exported program
trace(model), explain(name, model) all names of a model's tensors, or of one
check(files), undo(path), rules()  as the commands

load(ckpt, model, optimizer)       into a live model, whatever wrappers are between them
save_names, check_names            the names of a model as a unit test
open_checkpoint(ckpt), write       the index of a checkpoint; write a changed one

They raise `CkptError`, and `Refused` if they would have to guess or lose something. An operand is a
path, a URL, a state dict or a model, as the command line takes it or as an object.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # `typing` takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

    from ckpttool.checks import Checks, check
    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.core.errors import CkptError, Problem, Refused
    from ckpttool.core.names import Names
    from ckpttool.core.plan import Plan
    from ckpttool.diffing.result import Diff
    from ckpttool.fixes.diff import diff
    from ckpttool.fixes.fix import fix
    from ckpttool.inspection.explain import Explanation, explain
    from ckpttool.inspection.inspect import inspect
    from ckpttool.inspection.result import Inspection
    from ckpttool.live.load import HyperparameterChange, Loaded, load
    from ckpttool.live.names_file import check_names, save_names
    from ckpttool.live.swap import Swapped
    from ckpttool.operands.checkpoint import open_checkpoint
    from ckpttool.operands.model import trace
    from ckpttool.remapping.result import Remap
    from ckpttool.remapping.run import convert, remap, write
    from ckpttool.remapping.undo import Undone, undo
    from ckpttool.ruleset.parse import rules
    from ckpttool.swap.result import Swap
    from ckpttool.swapping import swap_weights

    __version__: str

__all__ = [
    "Checkpoint",
    "Checks",
    "CkptError",
    "Diff",
    "Explanation",
    "HyperparameterChange",
    "Inspection",
    "Loaded",
    "Names",
    "Plan",
    "Problem",
    "Refused",
    "Remap",
    "Swap",
    "Swapped",
    "Undone",
    "check",
    "check_names",
    "convert",
    "diff",
    "explain",
    "fix",
    "inspect",
    "load",
    "open_checkpoint",
    "remap",
    "rules",
    "save_names",
    "swap_weights",
    "trace",
    "undo",
    "write",
]

# Name -> its module, which is imported when the name is first used.
_MODULES = {
    **dict.fromkeys(("Checks", "check"), "checks"),
    "Checkpoint": "core.checkpoint",
    **dict.fromkeys(("CkptError", "Problem", "Refused"), "core.errors"),
    "Names": "core.names",
    "Plan": "core.plan",
    "Diff": "diffing.result",
    "diff": "fixes.diff",
    "fix": "fixes.fix",
    **dict.fromkeys(("Explanation", "explain"), "inspection.explain"),
    "Inspection": "inspection.result",
    "inspect": "inspection.inspect",
    **dict.fromkeys(("HyperparameterChange", "Loaded", "load"), "live.load"),
    **dict.fromkeys(("check_names", "save_names"), "live.names_file"),
    "Swapped": "live.swap",
    "open_checkpoint": "operands.checkpoint",
    "trace": "operands.model",
    "Remap": "remapping.result",
    **dict.fromkeys(("convert", "remap", "write"), "remapping.run"),
    **dict.fromkeys(("Undone", "undo"), "remapping.undo"),
    "rules": "ruleset.parse",
    "Swap": "swap.result",
    "swap_weights": "swapping",
}


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return _version()
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from ckpttool.core import values

        values.to_html, values.to_text = _to_html, _to_text
        return getattr(import_module(f"ckpttool.{_MODULES[name]}"), name)


def _version() -> str:
    import os

    try:
        with open(os.path.join(os.path.dirname(__file__), "version.txt"), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:  # files of a repository that nothing has installed
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("ckpttool")
        except PackageNotFoundError:
            return "0+unknown"


def _to_html(result: Any) -> str | None:
    """Return the table of a result in a notebook: the modules of the results know nothing of
    reports.
    """
    from ckpttool.report import html

    return html(result)


def _to_text(result: Any) -> str | None:
    """Return what the command line prints for a result."""
    from ckpttool.report import text

    return text(result)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
