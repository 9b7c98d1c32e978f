"""`fix`: write a checkpoint with the fix that `diff` suggests."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from ckpttool.core.codes import CODES
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.options import FixOptions, OutputOptions, expand_options, keywords_of
from ckpttool.core.text import code_of, shell
from ckpttool.fixes.diff import diff
from ckpttool.operands.checkpoint import Ckpt
from ckpttool.operands.model import operand_of
from ckpttool.remapping.run import remap

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.diffing.result import Diff
    from ckpttool.io.progress import Progress
    from ckpttool.keywords import FixKeywords
    from ckpttool.remapping.plan import Remap


@expand_options(FixOptions)
def fix(
    ckpt: Ckpt, out: str | None = None, *, progress: Progress | None = None, **options: Unpack[FixKeywords]
) -> Remap:
    """Write the checkpoint as `model` loads it, and `optimizer` if it is named: what `diff` suggests.

    Only a fix that was tried, and after which nothing differs, is applied. Raise `Refused`, with the reasons, if there
    is none or if the checkpoint already fits, and otherwise as `remap` does.
    """
    chosen = FixOptions(out=out, **options)
    if chosen.model is None:
        raise CkptError("a fix is for a model", hint="pass --model MODEL")
    found = diff(ckpt, **{name: getattr(chosen, name) for name in ("model", "materialize", "optimizer")})
    done = next((one.options for one in found.fix if one.options is not None), None)
    if done is None:
        raise _refusal(ckpt, chosen, found)
    written = {field.name: getattr(chosen, field.name) for field in fields(OutputOptions)}
    result = remap(ckpt, progress=progress, **keywords_of(replace(done, **written)))
    about_fix = (note for note in found.notes if code_of(note) and CODES[code_of(note)].kind == "fix")
    return replace(result, notes=(*result.notes, *about_fix))


def _refusal(ckpt: Ckpt, options: FixOptions, found: Diff) -> Refused:
    """Return why no fix is applied."""
    operand = ckpt if isinstance(ckpt, str) else "CKPT"
    model = operand_of(options)
    words = () if model is None else model.words
    optimizer = ("--optimizer", options.optimizer) if isinstance(options.optimizer, str) else ()
    command = shell("ckpttool", "diff", operand, *words, *optimizer)
    if found.identical:
        return Refused(f"nothing to fix: {operand} already loads", hint=f"{command} shows it")
    problems = [Problem(CODES[one.code].meaning, key) for one in found.unfixed for key in one.keys]
    hint = f"{command} shows what differs, why, and what fixes a part of it"
    return Refused(f"no command fixes {operand} completely", hint=hint, problems=problems)
