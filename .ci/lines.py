"""Check that lines of the package can be read: no comprehension inside of another one, and no
variable whose name says nothing.

python .ci/lines.py [PACKAGE]     (default: ckpttool)

`LEFT` are what is left from before this check, for each package. A number may only shrink.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMPTY = frozenset(("one", "own", "found", "made", "mine", "theirs", "known"))
LOOPS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
NESTED, NAMES = "comprehensions in comprehensions", "names that say nothing"

# package -> what is left
LEFT: dict[str, dict[str, int]] = {}


def faults(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each fault with its line."""
    for node in ast.walk(tree):
        if isinstance(node, LOOPS) and is_nested(node):
            yield NESTED, node.lineno
        elif name_bound_by(node) in EMPTY:
            yield NAMES, node.lineno


def name_bound_by(node: ast.AST) -> str:
    """Return the name of the argument or of the variable that the node sets; empty for others."""
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return ""


def is_nested(comprehension: ast.AST) -> bool:
    inside = (node for node in ast.walk(comprehension) if node is not comprehension)
    return any(isinstance(node, LOOPS) for node in inside)


def main(package: str = "ckpttool") -> int:
    """Print the faults of packages that have more or fewer than are listed; return the status."""
    counts: dict[str, Counter[str]] = {}
    places: dict[tuple[str, str], list[str]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        relative = path.relative_to(ROOT / package)
        name = relative.parts[0].removesuffix(".py")
        for fault, line in faults(ast.parse(path.read_text(encoding="utf-8"))):
            counts.setdefault(name, Counter())[fault] += 1
            places.setdefault((name, fault), []).append(f"{package}/{relative}:{line}")
    status = 0
    for name in sorted(counts.keys() | LEFT.keys()):
        for fault in (NESTED, NAMES):
            count = counts.get(name, Counter())[fault]
            allowed = LEFT.get(name, {}).get(fault, 0)
            if count > allowed:
                status = 1
                print(f"{name}: {count} {fault}, {allowed} are allowed:")
                print(*places[name, fault], sep="\n")
            elif count < allowed:
                status = 1
                print(
                    f"{name}: {count} {fault}: write this number into LEFT in {Path(__file__).name}"
                )
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
