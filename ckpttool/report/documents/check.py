"""The document of `check`: a row for each file, and all that is wrong."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.checks import Checks
from ckpttool.errors import Problem
from ckpttool.report.document import Block, Cell, Column, Document, Note, Problems, Table, noted
from ckpttool.words import number, plural


def document(checks: Checks) -> Document:
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
