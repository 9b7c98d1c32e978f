"""The rules of the house in docs/architecture.md: who may import torch, who may print, and who may know whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "ckpttool").rglob("*.py"))
}


def imports(name: str) -> Iterator[str]:
    """Every module that `name` imports anywhere, also within functions."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


WITH_TORCH = ("ckpttool.evaluate.with_torch", "ckpttool.live", "ckpttool.tracing")


def test_torch_is_imported_where_models_are_run_and_values_computed_and_nowhere_else() -> None:
    importers = [name for name in MODULES if any(below(other, "torch") for other in imports(name))]
    assert [name for name in importers if not below(name, *WITH_TORCH)] == []


def test_what_needs_no_torch_loads_none() -> None:
    """Not by way of another module either, those of `naming` that it uses among them."""
    free = [name for name in MODULES if not below(name, *WITH_TORCH, "ckpttool.__main__")]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", code, *free], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(free) > 80


@pytest.mark.parametrize(
    ("known", "by"),
    [
        ("ckpttool.cli", ("ckpttool.cli", "ckpttool.__main__")),
        ("ckpttool.report", ("ckpttool.cli", "ckpttool.report")),
        ("rich", ("ckpttool.report.renderers.terminal", "ckpttool.cli")),
        ("typer", ("ckpttool.cli",)),
    ],
)
def test_arrows_point_one_way(known: str, by: tuple[str, ...]) -> None:
    assert [name for name in MODULES if any(below(i, known) for i in imports(name)) and not below(name, *by)] == []


def test_only_the_command_line_prints() -> None:
    def prints(name: str) -> bool:
        calls = (n for n in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))) if isinstance(n, ast.Call))
        return any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)

    assert [name for name in MODULES if prints(name) and not below(name, "ckpttool.cli")] == []
