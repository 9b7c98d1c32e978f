"""The documents of `trace`, `explain` and `check`."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.checks import Checks
from ckpttool.core.codes import Row
from ckpttool.core.errors import Problem
from ckpttool.core.names import Names
from ckpttool.core.text import number, plural, shape_text
from ckpttool.diffing.names import compare_names
from ckpttool.diffing.result import Diff, names_outlines
from ckpttool.inspection.explain import Explanation
from ckpttool.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Facts,
    Keys,
    Note,
    Problems,
    Table,
    facts,
    noted,
)
from ckpttool.report.documents import diff as diff_report


def document(names: Names, *, all: bool = False, written: str | None = None) -> Document:
    """Return what `trace` shows: counts, why serialized keys differ from runtime names, and if they
    load again.
    """
    entries = compare_names(names)
    diff = Diff("serialized", "runtime", False, entries, outlines=names_outlines(names))
    shown = diff_report.document(diff, all=all)
    tables = [block for block in shown.blocks if isinstance(block, (Table, Keys))]
    parameters = [t for t in names.runtime if t.kind == "parameter"]
    counts = (
        (
            "parameters",
            f"{number(len(parameters))}"
            f" ({number(sum(not t.trainable for t in parameters))} frozen)",
        ),
        ("buffers", number(len(names.runtime) - len(parameters))),
        ("aliases", number(sum(t.alias_of is not None for t in names.runtime))),
        ("serialized keys", number(len(names.serialized))),
        ("extra state", number(len(names.extra_state))),
        ("torch", names.torch),
    )
    blocks: list[Block] = [*tables, Facts(tuple(pair for pair in counts if pair[1] != "0"))]
    if names.roundtrips:
        blocks.append(Note("load_state_dict() reads back what state_dict() writes"))
    else:
        blocks.append(
            Note("load_state_dict() does not read back what state_dict() writes:", "warning")
        )
        blocks.append(Problems(names.roundtrip_problems, "warning"))
    blocks += noted(names.notes)
    if written is not None:
        blocks.append(Note(f"names file: {written}"))
    renamed = sum(entry.status in ("renamed", "transformed") for entry in entries)
    keys = plural(len(names.serialized), "serialized key")
    verdict = f"{keys}, {number(renamed)} of them different from the runtime name"
    return Document(f"trace {names.model}", verdict, names.roundtrips, tuple(blocks), shown.listing)


def explained(explanation: Explanation) -> Document:
    tensor, optimizer = explanation.tensor, explanation.optimizer
    kind = (
        f"{'trainable' if tensor.trainable else 'frozen'} parameter"
        if tensor.kind == "parameter"
        else "buffer"
    )
    shown = facts(
        ("runtime", Cell(tensor.fqn, "key")),
        ("canonical", Cell(tensor.canonical, "key")),
        ("serialized", Cell(", ".join(explanation.serialized) or "not serialized", "key")),
        ("aliases", Cell(", ".join(explanation.aliases) or "none", "key")),
        ("also a name of", Cell(", ".join(explanation.also), "key")),
        ("tensor", f"{tensor.dtype} {shape_text(tensor.shape)}, {kind}"),
        ("persistent", "" if tensor.persistent else "no"),
        (
            "optimizer id",
            "" if optimizer is None else f"{optimizer.id} (param group {optimizer.group})",
        ),
        ("optimizer state", Cell(", ".join(explanation.states), "key")),
        ("renamed by", str(explanation.hook or "")),
    )
    verdict = plural(len({tensor.fqn, *explanation.serialized, *explanation.aliases}), "name")
    return Document(f"explain {explanation.name}", verdict, True, (shown,))


def explained_code(row: Row) -> Document:
    rows = (("kind", row.kind), ("example", row.example), ("what to do", row.fix))
    return Document(f"explain {row.code}", row.meaning, True, (facts(*rows),))


def check_document(checks: Checks) -> Document:
    rows = tuple(
        (
            file.path,
            file.kind,
            Cell(plural(len(file.problems), "problem"), "bad")
            if file.problems
            else Cell("OK", "ok"),
        )
        for file in checks.files
    )
    columns = (Column("file", "key"), Column("type"), Column("result"))
    problems = tuple(
        one if one.key == file.path else Problem(f"{file.path}: {one.problem}", one.key)
        for file in checks.files
        for one in file.problems
    )
    blocks: list[Block] = [Table("Files", columns, rows)]
    blocks += [Problems(problems)] if problems else []
    blocks += [Note(f"hint: {file.path}: {file.hint}") for file in checks.files if file.hint]
    for file in checks.files:
        blocks += (replace(note, text=f"{file.path}: {note.text}") for note in noted(file.notes))
    wrong = sum(bool(file.problems) for file in checks.files)
    count = plural(len(rows), "file")
    verdict = f"{number(wrong)} of {count} with problems" if wrong else f"{count} checked: OK"
    return Document("check", verdict, checks.ok, tuple(blocks))
