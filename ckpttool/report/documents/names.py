"""The documents of `trace`, `explain` and `check`."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.checks import Checks
from ckpttool.core.codes import Row
from ckpttool.core.errors import Problem
from ckpttool.core.names import Names
from ckpttool.core.text import number, plural, shape_text, some
from ckpttool.diffing.names import compare_names
from ckpttool.diffing.result import HARMLESS, Diff, names_outlines, statuses_of
from ckpttool.inspection.explain import Explanation
from ckpttool.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Facts,
    Keys,
    Paragraph,
    Problems,
    Table,
    facts,
    noted,
)
from ckpttool.report.documents import diff as diff_report

_FEW = 3  # files that the first line names


def document(names: Names, *, all: bool = False, written: str | None = None) -> Document:
    """Return what `trace` shows: counts, why serialized keys differ from runtime names, and if they
    load again.
    """
    entries = compare_names(names)
    statuses = statuses_of(entries)
    diff = Diff(
        "serialized",
        "runtime",
        statuses <= HARMLESS,
        entries,
        outlines=names_outlines(names),
        asks="names",
        names=(names.model, names.model),
    )
    shown = diff_report.document(diff, all=all)
    tables = [block for block in shown.blocks if isinstance(block, (Table, Keys))]
    blocks: list[Block] = [*tables, _counts(names)]
    verdict = shown.verdict
    if written is not None:
        verdict = f"wrote {written}: {verdict}"
    if names.roundtrips:
        blocks.append(Paragraph("load_state_dict() reads back what state_dict() writes"))
    else:
        verdict += "; it does not load all that it saves"
        text = "load_state_dict() does not read back what state_dict() writes:"
        blocks.append(Paragraph(text, "warning"))
        blocks.append(Problems(names.roundtrip_problems, "warning"))
    blocks += noted(names.notes)
    return Document(f"trace {names.model}", verdict, names.roundtrips, tuple(blocks), shown.listing)


def _counts(names: Names) -> Facts:
    """Return how many tensors of each kind the model has, without zeros."""
    parameters = frozen = aliases = 0
    for tensor in names.runtime:
        aliases += tensor.alias_of is not None
        if tensor.kind == "parameter":
            parameters += 1
            frozen += not tensor.trainable
    pairs = (
        ("parameters", f"{number(parameters)} ({number(frozen)} frozen)"),
        ("buffers", number(len(names.runtime) - parameters)),
        ("aliases", number(aliases)),
        ("serialized keys", number(len(names.serialized))),
        ("extra state", number(len(names.extra_state))),
        ("optimizer", _optimizer(names)),
        ("torch", names.torch),
    )
    return Facts(tuple(pair for pair in pairs if pair[1] not in ("0", "")))


def _optimizer(names: Names) -> str:
    """Return the class of the optimizer and what it has; empty without an optimizer."""
    if names.optimizer_class is None:
        return ""
    params = plural(len(names.optimizer), "parameter")
    groups = plural(len(names.optimizer_groups), "param group")
    return f"{names.optimizer_class} of {params} in {groups}"


def explained(explanation: Explanation) -> Document:
    tensor, optimizer = explanation.tensor, explanation.optimizer
    kind = "buffer"
    if tensor.kind == "parameter":
        kind = "trainable parameter" if tensor.trainable else "frozen parameter"
    optimizer_id = ""
    if optimizer is not None:
        optimizer_id = f"{optimizer.id} (param group {optimizer.group})"
    shown = facts(
        ("runtime", Cell(tensor.fqn, "key")),
        ("canonical", Cell(tensor.canonical, "key")),
        ("serialized", Cell(", ".join(explanation.serialized) or "not serialized", "key")),
        ("aliases", Cell(", ".join(explanation.aliases) or "none", "key")),
        ("also a name of", Cell(", ".join(explanation.also), "key")),
        ("tensor", f"{tensor.dtype} {shape_text(tensor.shape)}, {kind}"),
        ("persistent", "" if tensor.persistent else "no"),
        ("optimizer id", optimizer_id),
        ("optimizer state", Cell(", ".join(explanation.states), "key")),
        ("renamed by", str(explanation.hook or "")),
    )
    return Document(f"explain {explanation.name}", _named(explanation), True, (shown,))


def _named(explanation: Explanation) -> str:
    """Return the names of the tensor in the model and in checkpoints, as a sentence."""
    fqn, serialized = explanation.tensor.fqn, explanation.serialized
    if not serialized:
        saved = "not saved"
    elif serialized == (fqn,):
        saved = "saved under this name"
    else:
        saved = f"saved as {', '.join(serialized)}"
    if explanation.name == fqn:
        return f"{fqn} is {saved}"
    return f"{explanation.name} is {fqn} in the model, which is {saved}"


def explained_code(row: Row) -> Document:
    shown = facts(("kind", row.kind), ("example", row.example), ("what to do", row.fix))
    return Document(f"explain {row.code}", f"{row.code}: {row.meaning}", True, (shown,))


def check_document(checks: Checks) -> Document:
    rows = []
    problems = []
    others: list[Block] = []
    for file in checks.files:
        result = Cell("OK", "ok")
        if file.problems:
            result = Cell(plural(len(file.problems), "problem"), "bad")
        rows.append((file.path, file.kind, result))
        for problem in file.problems:
            if problem.key != file.path:
                problem = Problem(f"{file.path}: {problem.problem}", problem.key)
            problems.append(problem)
        if file.hint:
            others.append(Paragraph(f"hint: {file.path}: {file.hint}"))
    for file in checks.files:
        for note in noted(file.notes):
            others.append(replace(note, text=f"{file.path}: {note.text}"))
    columns = (Column("file", "key"), Column("type"), Column("result"))
    blocks: list[Block] = [Table("Files", columns, tuple(rows))]
    if problems:
        blocks.append(Problems(tuple(problems)))
    return Document("check", _checked(checks), checks.ok, (*blocks, *others))


def _checked(checks: Checks) -> str:
    """Return which files have problems."""
    paths = [file.path for file in checks.files]
    wrong = [file.path for file in checks.files if file.problems]
    if not wrong:
        return f"no problems found in {some(paths, _FEW)}"
    if len(wrong) == 1:
        problems = sum(len(file.problems) for file in checks.files)
        return f"{wrong[0]} has {plural(problems, 'problem')}"
    count = f"{number(len(wrong))} of {plural(len(paths), 'file')}"
    return f"{count} have problems: {some(wrong, _FEW)}"
