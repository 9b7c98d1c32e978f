"""The house in docs/architecture.md, held against the code: who may import whom, who may import torch, print, write."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import ckpttool

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "ckpttool").rglob("*.py"))
}
ENTRIES = ("ckpttool", "ckpttool.__main__")  # the package itself and `python -m`: above all floors
WITH_TORCH = (
    *("ckpttool.tracing", "ckpttool.live", "ckpttool.evaluate.interpret", "ckpttool.evaluate.with_torch"),
    "ckpttool.io.together.torchrun",
)


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imports(name: str) -> Iterator[str]:
    """Every module that `name` imports anywhere, also within functions; of a package's module that one."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def floors() -> dict[str, dict[str, int]]:
    """Folder -> room in it -> its floor, as the page says."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```floors\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    found = {}
    for line in block.splitlines():
        folder, _, rooms = line.partition(":")
        place = "ckpttool" if folder == "ckpttool" else "ckpttool." + folder.replace("/", ".")
        found[place] = {room: floor for floor, row in enumerate(rooms.split("|")) for room in row.split()}
    return found


FLOORS = floors()


def test_the_page_names_every_room() -> None:
    there: dict[str, set[str]] = {}
    for name in MODULES:
        if name not in ENTRIES:
            folder, _, room = name.rpartition(".")
            there.setdefault(folder, set()).add(room)
    assert there == {folder: set(rooms) for folder, rooms in FLOORS.items()}


def test_imports_point_to_lower_floors() -> None:
    wrong = []
    for name in MODULES:
        for other in {found for found in imports(name) if below(found, "ckpttool")}:
            if name in ENTRIES or below(name, other) or below(other, name):  # a package and what is in it
                continue
            mine, theirs = name.split("."), other.split(".")
            depth = next(i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b)
            rooms = FLOORS[".".join(mine[:depth])]
            if not rooms[theirs[depth]] < rooms[mine[depth]]:
                wrong.append(f"{name} imports {other}")
    assert wrong == []


def test_a_package_holds_words_only() -> None:
    """An `__init__` says what goes in and out; what it exported would hide where it is."""
    exporting = {"ckpttool", "ckpttool.live", "ckpttool.report", "ckpttool.formats.containers.pickle_tree"}
    full = [n for n, path in MODULES.items() if path.name == "__init__.py" and len(tree(n).body) > 1]
    assert set(full) == exporting
    packages = [n for n, path in MODULES.items() if path.name == "__init__.py"]
    assert [name for name in packages if not ast.get_docstring(tree(name))] == []


def test_torch_is_imported_where_models_are_run_and_values_computed_and_nowhere_else() -> None:
    importers = [name for name in MODULES if any(below(other, "torch") for other in imports(name))]
    assert [name for name in importers if not below(name, *WITH_TORCH)] == []


def test_what_needs_no_torch_loads_none() -> None:
    """Not by way of another module either."""
    free = [name for name in MODULES if not below(name, *WITH_TORCH, "ckpttool.__main__")]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", code, *free], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(free) > 100


@pytest.mark.parametrize(
    ("known", "by"), [("rich", ("ckpttool.report.renderers.terminal", "ckpttool.cli")), ("typer", ("ckpttool.cli",))]
)
def test_packages_of_the_command_line_stay_there(known: str, by: tuple[str, ...]) -> None:
    assert [name for name in MODULES if any(below(i, known) for i in imports(name)) and not below(name, *by)] == []


def test_values_are_made_the_quick_way() -> None:
    """`dataclasses` has six methods compiled for each class, before a command says a word."""
    by = {
        name
        for name in MODULES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        if any(alias.name == "dataclass" for alias in node.names)
    }
    assert by == {"ckpttool.values"}


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call in the module, by what is called: ``print``, ``open``, ``os.replace``."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id, node
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                yield f"{node.func.value.id}.{node.func.attr}", node


def test_only_the_command_line_prints() -> None:
    assert [n for n in MODULES if any(c == "print" for c, _ in calls(n)) and not below(n, "ckpttool.cli")] == []


WRITERS = (
    *(f"ckpttool.io.{name}" for name in ("write_file", "write_folder", "write_remote")),
    *(
        f"ckpttool.io.{name}"
        for name in ("journal", "edit_journal", "old_files", "switch", "switch_folder", "temporary", "undo")
    ),
    "ckpttool.io.together.make",
    "ckpttool.cli.output",
)
CHANGES = {f"os.{name}" for name in ("replace", "rename", "link", "symlink", "unlink", "remove", "mkdir", "truncate")}


def test_only_the_writers_write() -> None:
    def writes(name: str) -> bool:
        for called, call in calls(name):
            modes = [a.value for a in call.args[1:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if called in CHANGES or (called == "open" and any(set(mode) & set("wax+") for mode in modes)):
                return True
        return False

    assert [name for name in MODULES if writes(name) and name not in WRITERS] == []


def test_what_is_listed_as_no_other_behaviour_stands_in_the_code() -> None:
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    rows = toml.loads((ROOT / "tests/mutants/equivalent.toml").read_text())["mutant"]
    lines = {
        path: {line.strip() for line in (ROOT / path).read_text().splitlines()} for path in {r["path"] for r in rows}
    }
    assert [
        row for row in rows if row["was"] not in lines[row["path"]] or row["was"] == row["now"] or not row["why"]
    ] == []


def test_the_front_door_has_what_it_says() -> None:
    assert sorted(ckpttool.__all__) == list(ckpttool.__all__)
    public = {name for name in dir(ckpttool) if name in ckpttool.__all__}
    assert public == set(ckpttool.__all__)
    for name in ckpttool.__all__:
        assert getattr(ckpttool, name).__doc__


def test_the_front_door_opens_at_once() -> None:
    """It imports nothing of its own before a name is asked for."""
    code = "import sys; before = set(sys.modules); import ckpttool; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert [name for name in done.stdout.split() if name.startswith(("ckpttool.", "torch", "typer", "rich"))] == []
