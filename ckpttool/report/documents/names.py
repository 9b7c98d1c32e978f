"""The documents of `trace`, `explain` and `check`."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.checks import Checks
from ckpttool.core.errors import Problem
from ckpttool.core.names import Names
from ckpttool.core.text import number, plural, shape_text
from ckpttool.diffing.names import compare_names
from ckpttool.diffing.result import Diff, names_outlines
from ckpttool.inspection.explain import Explanation
from ckpttool.report.document import Block, Cell, Column, Document, Facts, Note, Problems, Table, facts, noted
from ckpttool.report.documents import diff as diff_report


def document(names: Names, *, all: bool = False, written: str | None = None) -> Document:
    """What `trace` shows: counts, every cause for which a serialized key is not a runtime name, and the way back."""
    entries = compare_names(names)
    diff = Diff("serialized", "runtime", False, entries, outlines=names_outlines(names))
    shown = diff_report.document(diff, all=all)
    tables = [block for block in shown.blocks if isinstance(block, Table)]
    blocks: list[Block] = [Facts(_counts(names)), *tables]
    if names.roundtrips:
        blocks.append(Note("load_state_dict() reads back what state_dict() writes"))
    else:
        blocks.append(Note("load_state_dict() does not read back what state_dict() writes:", "warning"))
        blocks.append(Problems(names.roundtrip_problems, "warning"))
    blocks += noted(names.notes)
    if written is not None:
        blocks.append(Note(f"names file: {written}"))
    renamed = sum(entry.status in ("renamed", "transformed") for entry in entries)
    verdict = f"{plural(len(names.serialized), 'serialized key')}, {number(renamed)} of them not under the runtime name"
    return Document(f"trace {names.model}", verdict, names.roundtrips, tuple(blocks), shown.listing)


def _counts(names: Names) -> tuple[tuple[str, str], ...]:
    parameters = [t for t in names.runtime if t.kind == "parameter"]
    frozen = sum(not t.trainable for t in parameters)
    aliases = sum(t.alias_of is not None for t in names.runtime)
    return (
        ("parameters", f"{number(len(parameters))} ({number(frozen)} frozen)"),
        ("buffers", number(len(names.runtime) - len(parameters))),
        ("aliases", number(aliases)),
        ("serialized keys", number(len(names.serialized))),
        ("extra state", number(len(names.extra_state))),
        ("torch", names.torch),
    )


def explained(found: Explanation) -> Document:
    """What `explain` shows."""
    tensor = found.tensor
    kind = f"{'trainable' if tensor.trainable else 'frozen'} parameter" if tensor.kind == "parameter" else "buffer"
    optimizer = found.optimizer
    shown = facts(
        ("runtime", Cell(tensor.fqn, "key")),
        ("canonical", Cell(tensor.canonical, "key")),
        ("serialized", Cell(", ".join(found.serialized) or "not serialized", "key")),
        ("aliases", Cell(", ".join(found.aliases) or "none", "key")),
        ("another's name", Cell(", ".join(found.also), "key")),
        ("tensor", f"{tensor.dtype} {shape_text(tensor.shape)}, {kind}"),
        ("persistent", "" if tensor.persistent else "no"),
        ("optimizer id", "" if optimizer is None else f"{optimizer.id} (param group {optimizer.group})"),
        ("optimizer state", Cell(", ".join(found.states), "key")),
        ("renamed by", str(found.hook or "")),
    )
    verdict = plural(len({tensor.fqn, *found.serialized, *found.aliases}), "name")
    return Document(f"explain {found.name}", verdict, True, (shown,))


def check_document(checks: Checks) -> Document:
    """What was checked, and found."""
    rows = tuple(
        (
            file.path,
            file.kind,
            Cell(plural(len(file.problems), "problem"), "bad") if file.problems else Cell("nothing wrong", "ok"),
        )
        for file in checks.files
    )
    columns = (Column("file", "key"), Column("taken for"), Column("found"))
    problems = tuple(_at(file.path, one) for file in checks.files for one in file.problems)
    blocks: list[Block] = [Table("Files", columns, rows)]
    blocks += [Problems(problems)] if problems else []
    blocks += [Note(f"hint: {file.path}: {file.hint}") for file in checks.files if file.hint]
    for file in checks.files:
        blocks += (replace(note, text=f"{file.path}: {note.text}") for note in noted(file.notes))
    wrong = sum(bool(file.problems) for file in checks.files)
    of = plural(len(rows), "file")
    verdict = f"{number(wrong)} of {of} with problems" if wrong else f"{of}, nothing wrong"
    return Document("check", verdict, checks.ok, tuple(blocks))


def _at(path: str, problem: Problem) -> Problem:
    """The problem with its file, said once."""
    return problem if problem.key == path else Problem(f"{path}: {problem.problem}", problem.key)
