"""``make conditions``: what the code asks and no test decides both ways, in a copy of the repository.

Each condition (of an `if`, a `while`, a filter, and each operand of `and`, `or` and `not` among them) notes whether it
was true or false, in every process of the tests. One that always was the same is not needed, or not tested: a change of
it is sure to survive. So is one of an `except` clause that nothing enters.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from copies import copied, environment

_FALSE, _TRUE = 1, 2
_SAID = {0: "never asked", _FALSE: "never true", _TRUE: "never false"}
_RECORDER = """import mmap
with open({path!r}, "r+b") as file:
    seen = mmap.mmap(file.fileno(), 0)  # one for all processes, however they end
def decided(place, value):
    seen[place] |= 2 if value else 1
    return value
"""


@dataclass(frozen=True)
class Place:
    """A condition, or an `except` clause, with its text on one line; `known` is what needs no test."""

    path: str
    line: int
    text: str
    known: int = 0


class Recorded(ast.NodeTransformer):
    """Wraps each condition of the module at `path`, whose text is `source`, in a call, and adds it to `places`."""

    def __init__(self, path: str, source: str, places: list[Place]) -> None:
        self.path, self.source, self.places = path, source, places

    def _noted(self, node: ast.expr | ast.ExceptHandler, value: ast.expr, text: str, known: int = 0) -> ast.expr:
        self.places.append(Place(self.path, node.lineno, " ".join(text.split()), known))
        return ast.Call(ast.Name("_decided", ast.Load()), [ast.Constant(len(self.places) - 1), value], [])

    def truth(self, node: ast.expr) -> ast.expr:
        """Of an expression that is asked for its truth alone."""
        if isinstance(node, ast.BoolOp):
            node.values = [self.truth(value) for value in node.values]
            return node
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node.operand = self.truth(node.operand)
            return node
        if isinstance(node, ast.Constant) or ast.unparse(node) == "TYPE_CHECKING":
            return node
        text = ast.get_source_segment(self.source, node) or ""
        return self._noted(node, self.visit(node), text)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Whatever has a test or filters; annotations of parameters are left as they are."""
        if isinstance(node, ast.arguments):
            node.defaults = [self.visit(default) for default in node.defaults]
            return node
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            test, node.test = self.truth(node.test), ast.Constant(True)
            super().generic_visit(node)
            node.test = test
        elif isinstance(node, ast.comprehension):
            filters, node.ifs = [self.truth(one) for one in node.ifs], []
            super().generic_visit(node)
            node.ifs = filters
        else:
            super().generic_visit(node)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """Where a value is taken, it may be that of the last operand."""
        node.values = [*map(self.truth, node.values[:-1]), self.visit(node.values[-1])]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """`not`, or an operator of numbers."""
        return self.truth(node) if isinstance(node.op, ast.Not) else self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        """That it is not entered needs no test."""
        self.generic_visit(node)
        text = f"except {ast.unparse(node.type)}" if node.type else "except"
        node.body.insert(0, ast.Expr(self._noted(node, ast.Constant(True), text, known=_FALSE)))
        return node


def recorded(copy: Path) -> list[Place]:
    """Rewrites the package of the copy, each of whose processes notes in the file `seen` what it decides."""
    places: list[Place] = []
    for path in sorted((copy / "ckpttool").rglob("*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        Recorded(str(path.relative_to(copy)), source, places).visit(tree)
        first = next(
            (
                at
                for at, one in enumerate(tree.body)
                if not isinstance(one, ast.Expr) and "__future__" not in ast.dump(one)
            ),
            0,
        )
        tree.body[first:first] = ast.parse("from _recorder import decided as _decided").body
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    (copy / "seen").write_bytes(bytes(place.known for place in places))
    (copy / "_recorder.py").write_text(_RECORDER.format(path=str(copy / "seen")))
    return places


def left(copy: Path, places: Sequence[Place]) -> list[tuple[Place, str]]:
    """Those that no process of the copy has decided both ways."""
    seen = (copy / "seen").read_bytes()
    return [(place, said) for place, one in zip(places, seen) if (said := _SAID.get(one))]


def main(args: Sequence[str]) -> int:
    """Runs pytest with `args`, and prints the places."""
    with tempfile.TemporaryDirectory(prefix="ckpttool-conditions-") as folder:
        copy = copied(Path(folder).resolve())
        places = recorded(copy)
        line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        line += ["--deselect", "tests/test_architecture.py", *args]
        subprocess.run(line, cwd=copy, env=environment(copy))
        found = left(copy, places)
    for place, said in found:
        print(f"{place.path}:{place.line}: {said}: {place.text}")
    print(f"{len(places) - len(found):,} of {len(places):,} conditions were decided both ways, {len(found):,} were not")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
