"""``make conditions``: list the conditions that the tests never evaluate both ways, in a copy of
the repository.

Each condition (an `if`, a `while`, a filter, or an operand of `and`, `or` and `not` in one) records
whether it was true or false, in every process of the tests. A condition that always has the same
value is redundant or not tested: any mutant of it survives. The same applies to an `except` clause
that is never entered.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from copies import copy_repository, environment

_FALSE, _TRUE = 1, 2
_MISSING = {0: "never evaluated", _FALSE: "never true", _TRUE: "never false"}
_RECORDER = """import mmap
with open({path!r}, "r+b") as file:
    seen = mmap.mmap(file.fileno(), 0)  # shared by all processes, so a killed one loses nothing
def decided(place, value):
    seen[place] |= 2 if value else 1
    return value
"""


@dataclass(frozen=True)
class Place:
    """A condition or an `except` clause, with its text on one line; `known` are the outcomes that
    need no test.
    """

    path: str
    line: int
    text: str
    known: int = 0


class Recorder(ast.NodeTransformer):
    """Wrap each condition of the module at `path` in a call, and append it to `places`."""

    def __init__(self, path: str, source: str, places: list[Place]) -> None:
        self.path, self.source, self.places = path, source, places

    def _recorded(
        self, node: ast.expr | ast.ExceptHandler, value: ast.expr, text: str, known: int = 0
    ) -> ast.expr:
        self.places.append(Place(self.path, node.lineno, " ".join(text.split()), known))
        return ast.Call(
            ast.Name("_outcome", ast.Load()), [ast.Constant(len(self.places) - 1), value], []
        )

    def truth(self, node: ast.expr) -> ast.expr:
        """Record an expression of which only the truth value is used."""
        if isinstance(node, ast.BoolOp):
            node.values = [self.truth(value) for value in node.values]
            return node
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node.operand = self.truth(node.operand)
            return node
        if isinstance(node, ast.Constant) or ast.unparse(node) == "TYPE_CHECKING":
            return node
        text = ast.get_source_segment(self.source, node) or ""
        return self._recorded(node, self.visit(node), text)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Record tests and filters; skip annotations of parameters."""
        if isinstance(node, ast.arguments):
            node.defaults = [self.visit(default) for default in node.defaults]
            return node
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            test, node.test = self.truth(node.test), ast.Constant(True)
            super().generic_visit(node)
            node.test = test
        elif isinstance(node, ast.comprehension):
            filters, node.ifs = [self.truth(condition) for condition in node.ifs], []
            super().generic_visit(node)
            node.ifs = filters
        else:
            super().generic_visit(node)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """Record all operands but the last, which may be used as a value."""
        node.values = [*map(self.truth, node.values[:-1]), self.visit(node.values[-1])]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """Record the operand of `not`; leave arithmetic operators alone."""
        return self.truth(node) if isinstance(node.op, ast.Not) else self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        """Record that the clause is entered; no test has to skip it."""
        self.generic_visit(node)
        text = f"except {ast.unparse(node.type)}" if node.type else "except"
        node.body.insert(0, ast.Expr(self._recorded(node, ast.Constant(True), text, known=_FALSE)))
        return node


def instrument(copy: Path) -> list[Place]:
    """Rewrite the package in the copy so that each of its processes records conditions in the file
    `seen`.
    """
    places: list[Place] = []
    for path in sorted((copy / "ckpttool").rglob("*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        Recorder(str(path.relative_to(copy)), source, places).visit(tree)
        start = next(
            (
                number
                for number, node in enumerate(tree.body)
                if not isinstance(node, ast.Expr) and "__future__" not in ast.dump(node)
            ),
            0,
        )
        tree.body[start:start] = ast.parse("from _recorder import decided as _outcome").body
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    (copy / "seen").write_bytes(bytes(place.known for place in places))
    (copy / "_recorder.py").write_text(_RECORDER.format(path=str(copy / "seen")))
    return places


def undecided(copy: Path, places: Sequence[Place]) -> list[tuple[Place, str]]:
    """Return the places that no process of the copy has evaluated both ways, with the missing
    outcome.
    """
    seen = (copy / "seen").read_bytes()
    return [
        (place, outcome) for place, bits in zip(places, seen) if (outcome := _MISSING.get(bits))
    ]


def main(args: Sequence[str]) -> int:
    """Run pytest with `args`, and print the places."""
    with tempfile.TemporaryDirectory(prefix="ckpttool-conditions-") as folder:
        copy = copy_repository(Path(folder).resolve())
        places = instrument(copy)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        command += ["--deselect", "tests/test_architecture.py", *args]
        subprocess.run(command, cwd=copy, env=environment(copy))
        missing = undecided(copy, places)
    for place, outcome in missing:
        print(f"{place.path}:{place.line}: {outcome}: {place.text}")
    total = len(places)
    print(
        f"{total - len(missing):,} of {total:,} conditions were evaluated both ways,"
        f" {len(missing):,} were not"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
