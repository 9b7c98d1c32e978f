"""Files that are kept in a repository, each checked for what it is: before a commit, and in a
pipeline.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from typing import TYPE_CHECKING, Any

from ckpttool.containers.nodes import entries_with_code
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.options import OptimizerOptions, expand_options, several
from ckpttool.core.pickle_imports import DANGEROUS, UNKNOWN, UNREADABLE, Import
from ckpttool.core.schema import (
    FLAG,
    PROBLEM,
    TEXT,
    list_of,
    notes_as,
    nullable,
    record,
    unless_empty,
)
from ckpttool.core.text import Info, Note, prefix_of, shell, visible
from ckpttool.core.values import dataclass, public
from ckpttool.diffing.options import DiffOptions
from ckpttool.fixes.names import diff_names_file
from ckpttool.formats.opening import unsafe_in_folder
from ckpttool.io.files import forget_and_check
from ckpttool.operands.checkpoint import is_code, model_section, open_operand
from ckpttool.operands.model import ModelOperand, operand_of
from ckpttool.operands.names_files import is_names_file, read_names
from ckpttool.operands.output import command, free
from ckpttool.remapping.options import ConvertOptions, RemapOptions
from ckpttool.remapping.run import run
from ckpttool.ruleset import parse as rules

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.keywords import CheckKeywords

_SAYS = {
    DANGEROUS: "a dangerous import: it runs code when the pickle is loaded",
    UNKNOWN: "an unknown import: it runs code of its module when the pickle is loaded",
    UNREADABLE: "not looked into: what the pickle runs when it is loaded is unknown",
}
_NOT_READ = Info("only the index was read, not the values of the tensors", "not-read")
_NOT_COMPARED = Note(
    "the names were not compared with a model's code: none is named (--model)",
    "no-model",
)


@dataclass(frozen=True, slots=True)
class Checked:
    """The result for one file.

    Attributes:
        path: The file.
        kind: ``checkpoint``, ``names`` or ``rules``.
        problems: Everything that is wrong with it.
        hint: How to fix the problems.
        notes: Remarks on parts that were not checked.
    """

    path: str
    kind: str
    problems: tuple[Problem, ...] = ()
    hint: str = ""
    notes: tuple[str, ...] = ()


@public
@dataclass(frozen=True, slots=True)
class Checks:
    """The result of `check`.

    Attributes:
        files: The result for each file, in the order in which they were named.
    """

    files: tuple[Checked, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with any of them."""
        return not any(file.problems for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """The `check` object of the contract."""
        return dict(CHECKS.write(self))


_CHECKED = record(
    Checked,
    {
        "path": TEXT,
        "kind": TEXT,
        "problems": list_of(PROBLEM),
        "hint": nullable(unless_empty(TEXT)),
        "notes": notes_as("model"),
    },
)
CHECKS = record(Checks, {"ok": FLAG, "files": list_of(_CHECKED)}, title="ckpttool.check/1")


@expand_options(OptimizerOptions)
def check(
    files: str | Sequence[str], *, allow: str | Sequence[str] = (), **options: Unpack[CheckKeywords]
) -> Checks:
    """Check files of a repository, each for what it is: names files (against `model`), rules,
    checkpoints.

    A checkpoint fails for each import of its pickles that is dangerous or unknown and that no shell
    pattern in `allow` names.

    Args:
        files: A path, or several.
        allow: Shell patterns of imports that are accepted.
        **options: `model`, `optimizer` and `materialize`, as for `trace`.

    Returns:
        The files with their problems; `ok` if there are none.

    Raises:
        OSError: A file cannot be read.
        CkptError: A model or optimizer cannot be built: that is not a fault of the files.

    Example::

        checks = ckpttool.check(["names.json", "train.pt"], model="model.py:build")
        assert checks.ok
    """
    paths, chosen, allowed = several(files) or (), DiffOptions(**options), several(allow) or ()
    _check_files(paths)
    kinds = [_kind(path) for path in paths]
    model = operand_of(chosen)
    if model is not None and "names" in kinds:
        model.names()
    elif model is not None:
        path = next((path for path, kind in zip(paths, kinds) if kind == "checkpoint"), "CKPT")
        raise CkptError(
            "`check` compares names files with --model, and none is among the files",
            hint=f"whether a checkpoint loads: {_diff_line(path, model)}",
        )
    files_checked = []
    for path, kind in zip(paths, kinds):
        files_checked.append(_checked(path, kind, model, chosen, allowed))
    return Checks(tuple(files_checked))


def _check_files(operands: Sequence[str]) -> None:
    """Raise `CkptError`, with the command that names it, if an operand is a model."""
    if "" in operands:
        raise CkptError("the name of a file is empty", hint="name the files to check")
    models = [operand for operand in operands if is_code(operand)]
    if models:
        files = [operand for operand in operands if operand not in models]
        raise CkptError(
            f"{models[0]} is a model, and `check` takes files",
            hint=shell("ckpttool", "check", *(files or ["names.json"]), "--model", models[0]),
        )


def _diff_line(path: str, model: ModelOperand) -> str:
    return shell("ckpttool", "diff", path, *model.words)


def _kind(path: str) -> str:
    forget_and_check(path)  # raises if an edit was interrupted: its content is not final then
    if not os.path.isdir(path):
        with open(path, "rb"):
            pass  # raises if it cannot be read
    if path.endswith(".toml"):
        return "rules"
    return "names" if is_names_file(path) else "checkpoint"


def _checked(
    path: str, kind: str, model: ModelOperand | None, options: DiffOptions, allow: Sequence[str]
) -> Checked:
    try:
        if kind == "rules":
            rules.read_rules(path)
        elif kind == "names":
            read_names(path)
        else:
            checked = _pickles(path, open_operand(path), allow)
            if model is None:
                return checked
            text = f"whether it loads was not checked: {_diff_line(path, model)}"
            return replace(checked, notes=(*checked.notes, Info(text, "not-checked")))
    except CkptError as error:
        of_file = Problem(error.message.removeprefix(path).lstrip(": "), path, "invalid-file")
        return Checked(path, kind, error.problems or (of_file,), error.hint)
    return _names(path, model, options) if kind == "names" else Checked(path, kind)


def _pickles(path: str, checkpoint: Checkpoint, allow: Sequence[str]) -> Checked:
    """Check the imports of a checkpoint's pickles, and of other files in its folder."""
    imports = []
    for imported in (*checkpoint.imports, *unsafe_in_folder(path, checkpoint, below=True)):
        if imported.verdict in _SAYS and not _is_allowed(imported, allow):
            imports.append(imported)
    if not imports:
        return Checked(path, "checkpoint", (), "", (_NOT_READ,))
    names_files = any(imported.file != path for imported in imports)
    problems = tuple(_of_import(imported, names_files) for imported in imports)
    if any(imported.verdict == DANGEROUS for imported in imports):
        hint = "do not load it"
        line = _weights_alone(checkpoint)
        if line is not None:
            hint += f"; to take the weights only, run {line}"
    else:
        hint = _to_allow(path, allow, dict.fromkeys(imported.name for imported in imports))
    return Checked(path, "checkpoint", problems, hint, (_NOT_READ,))


def _to_allow(path: str, allow: Iterable[str], names: Collection[str]) -> str:
    """Return the hint with the command that accepts these imports, too."""
    words = ["ckpttool", "check", path]
    for name in (*allow, *names):
        words += ["--allow", name]
    trusted = "it" if len(names) == 1 else "all of them"
    return f"if you trust {trusted}: {shell(*words)}"


def _is_allowed(imported: Import, allow: Sequence[str]) -> bool:
    return any(fnmatchcase(imported.name, pattern) for pattern in allow)


def _of_import(imported: Import, names_file: bool) -> Problem:
    """Return the import as a problem, with its place in the file; `names_file`: and the file."""
    says = _SAYS[UNREADABLE if imported.name == UNREADABLE else imported.verdict]
    file = f"{imported.file}: " if names_file and imported.member else ""
    kind = "dangerous-import" if imported.verdict == DANGEROUS else "unknown-import"
    text = f"{says} ({file}{imported.place}{_detail(imported)})"
    return Problem(text, imported.name, kind)


def _weights_alone(checkpoint: Checkpoint) -> str | None:
    """Return the command that writes the model of a file without its code, to a format that holds
    none.
    """
    try:
        section = model_section(checkpoint)
    except CkptError:  # none, or several
        if not checkpoint.state_dicts:
            return None
        section = checkpoint.state_dicts[0]
    source = checkpoint.part(section.path) if section.path else checkpoint.source
    code = dict.fromkeys(path for path, _ in entries_with_code(checkpoint))
    below = prefix_of(section.path)
    inside = [path for path in code if path.startswith(below)]
    objects = [extra.key for extra in section.extras if extra.value is None]
    out = "weights.safetensors"
    if os.path.lexists(out):
        out = free("weights", "clean", ".safetensors")
    for drop, keep_aliases in product(([], inside, objects), (False, True)):
        options = RemapOptions(out=out, drop=drop or None, keep_aliases=keep_aliases, dry_run=True)
        try:
            run(open_operand(source), options, may_copy=True)
        except CkptError:
            continue
        if drop:
            return command("remap", (source,), replace(options, dry_run=False))
        return command("convert", (source,), ConvertOptions(out=out, keep_aliases=keep_aliases))
    return None


def _detail(imported: Import) -> str:
    """Return the first call of the import if it has arguments, or why the pickle was not read."""
    detail = imported.calls[0] if imported.calls else imported.reason
    if detail == f"{imported.name}()":
        return ""
    return f": {visible(detail)}" if detail else ""


def _names(path: str, model: ModelOperand | None, options: DiffOptions) -> Checked:
    if model is None:
        return Checked(path, "names", notes=(_NOT_COMPARED,))
    diff = diff_names_file(path, model, options)
    if diff.identical:
        return Checked(path, "names")
    problems = []
    for entry in diff.entries:
        if diff.is_difference(entry):
            keys = ", ".join(entry.left or entry.right)
            why = f"{entry.status}: {entry.why(diff.names)}"
            problems.append(Problem(why, keys, entry.status))
    if diff.other_failure:
        problems.append(Problem(diff.other_failure, path))
    optimizer = ("--optimizer", options.optimizer) if isinstance(options.optimizer, str) else ()
    line = shell("ckpttool", "diff", path, *model.words, *optimizer)
    hint = f"{line} (with --update it writes the names of the model to the file)"
    return Checked(path, "names", tuple(problems), hint, diff.notes)
