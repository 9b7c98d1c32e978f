"""The names of a model in a file, for a unit test: `save_names` and `check_names`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.core.errors import CkptError, Refused
from ckpttool.core.options import OptimizerOptions, expand_options
from ckpttool.core.text import plural
from ckpttool.fixes.diff import diff
from ckpttool.io.pieces import Piece
from ckpttool.io.preflight import check_file
from ckpttool.io.write import WriteOptions, write_file
from ckpttool.operands.model import trace
from ckpttool.report.renderers import json

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.keywords import OptimizerKeywords


@expand_options(OptimizerOptions)
def save_names(model: Any, path: str, **options: Unpack[OptimizerKeywords]) -> None:
    """Write the names file of a model, as ``ckpttool trace MODEL -o PATH --force`` does.

    Args:
        model: Anything that `trace` takes.
        path: The file to write.
        **options: As for `trace`.

    Raises:
        CkptError: The model's own code fails, or the file cannot be written.

    Example::

        ckpttool.save_names(build(), "names.json")
    """
    text = json.render(trace(model, **options).to_json())
    check_file(path, (), force=True, in_place=True)
    write_file(
        [Piece(text.encode("utf-8", "backslashreplace"))],
        path,
        WriteOptions(replace=True, in_place=True),
    )


@expand_options(OptimizerOptions)
def check_names(
    model: Any,
    path: str,
    *,
    ignore: str | Sequence[str] | None = None,
    ignore_file: str | Sequence[str] | None = None,
    **options: Unpack[OptimizerKeywords],
) -> None:
    """Compare a model with a names file: for a unit test.

    Args:
        model: Anything that `trace` takes.
        path: The file, which `save_names` wrote.
        ignore: Changes that are accepted: ``missing head.* # trained again``.
        ignore_file: Files with such lines.
        **options: As for `trace`.

    Raises:
        Refused: Names have changed; every change that is not accepted is a problem.
        CkptError: There is no such file.

    Example::

        def test_names_of_checkpoints_stay():
            ckpttool.check_names(build(), "names.json")
    """
    again = f"ckpttool.save_names(model, {path!r})"
    if not os.path.exists(path):
        raise CkptError(f"{path} does not exist", hint=f"{again} writes it")
    changes = diff(path, model=model, ignore=ignore, ignore_file=ignore_file, **options)
    if not changes.passes:
        problems = changes.problems((path, "the model"))
        entries = filter(changes.is_difference, changes.entries)
        count = sum(entry.ignored is None for entry in entries)
        message = f"{plural(count, 'name')} of the model changed since {path} was written"
        if not count:
            message = f"the model is not as it was when {path} was written: {changes.other_failure}"
        raise Refused(
            message, hint=f"if checkpoints may change, {again} accepts it", problems=problems
        )
