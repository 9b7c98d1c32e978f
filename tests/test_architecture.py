"""Check docs/maintainers/architecture.md: import layers, and which modules import torch, print and
write.
"""

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
from ckpttool.core.codes import CODES
from ckpttool.formats import registry

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "ckpttool").rglob("*.py"))
}
ENTRIES = ("ckpttool", "ckpttool.__main__")  # the package itself and `python -m`: above all layers
WITH_TORCH = (
    *("ckpttool.tracing", "ckpttool.live", "ckpttool.evaluate.torch_eval"),
    "ckpttool.distributed.job",
    "ckpttool.operands.in_memory",
    "ckpttool.operands.reference",
)


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imports(name: str) -> Iterator[str]:
    """Yield every module that `name` imports, also inside functions; submodules rather than their
    packages.
    """
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def layers() -> dict[str, dict[str, int]]:
    """Return folder -> module -> layer, as listed on the page."""
    page = (ROOT / "docs" / "maintainers" / "architecture.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```layers\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    found = {}
    for line in block.splitlines():
        folder, _, names = line.partition(":")
        place = "ckpttool" if folder == "ckpttool" else "ckpttool." + folder.replace("/", ".")
        found[place] = {
            name: layer for layer, row in enumerate(names.split("|")) for name in row.split()
        }
    return found


LAYERS = layers()


def test_the_page_names_every_module() -> None:
    there: dict[str, set[str]] = {}
    for name in MODULES:
        if name not in ENTRIES:
            folder, _, last = name.rpartition(".")
            there.setdefault(folder, set()).add(last)
    assert there == {folder: set(names) for folder, names in LAYERS.items()}


def test_imports_point_to_lower_layers() -> None:
    wrong = []
    for name in MODULES:
        for other in {found for found in imports(name) if below(found, "ckpttool")}:
            # a package and what is in it
            if name in ENTRIES or below(name, other) or below(other, name):
                continue
            left, right = name.split("."), other.split(".")
            depth = next(i for i, (a, b) in enumerate(zip(left, right)) if a != b)
            layer = LAYERS[".".join(left[:depth])]
            if not layer[right[depth]] < layer[left[depth]]:
                wrong.append(f"{name} imports {other}")
    assert wrong == []


def test_package_init_files_contain_only_a_docstring() -> None:
    """Re-exported names would hide where they are defined."""
    exporting = {"ckpttool", "ckpttool.live", "ckpttool.report"}
    full = [
        n for n, path in MODULES.items() if path.name == "__init__.py" and len(tree(n).body) > 1
    ]
    assert set(full) == exporting
    packages = [n for n, path in MODULES.items() if path.name == "__init__.py"]
    assert [name for name in packages if not ast.get_docstring(tree(name))] == []


def test_torch_is_imported_only_in_the_modules_that_need_it() -> None:
    importers = [name for name in MODULES if any(below(other, "torch") for other in imports(name))]
    assert [name for name in importers if not below(name, *WITH_TORCH)] == []


def test_other_modules_do_not_load_torch() -> None:
    free = [name for name in MODULES if not below(name, *WITH_TORCH, "ckpttool.__main__")]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, name"
    done = subprocess.run(
        [sys.executable, "-c", code, *free], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert len(free) > 100


@pytest.mark.parametrize(
    ("known", "by"), [("rich", ("ckpttool.cli",)), ("typer", ("ckpttool.cli",))]
)
def test_rich_and_typer_are_imported_by_the_command_line_only(
    known: str, by: tuple[str, ...]
) -> None:
    assert [
        name
        for name in MODULES
        if any(below(i, known) for i in imports(name)) and not below(name, *by)
    ] == []


def test_value_classes_use_our_dataclass() -> None:
    """The standard one compiles six methods for each class, which doubles the start-up time."""
    by = {
        name
        for name in MODULES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        if any(alias.name == "dataclass" for alias in node.names)
    }
    assert by == {"ckpttool.core.values"}


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id, node
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                yield f"{node.func.value.id}.{node.func.attr}", node


def test_only_the_command_line_prints() -> None:
    assert [
        n
        for n in MODULES
        if any(c == "print" for c, _ in calls(n)) and not below(n, "ckpttool.cli")
    ] == []


WRITERS = (
    "ckpttool.io.syscalls",
    "ckpttool.io.temporary",
    "ckpttool.io.transaction",
    "ckpttool.io.undo",
    "ckpttool.io.write_folder",
    "ckpttool.distributed.files",
    "ckpttool.cli.output",
)
CHANGES = {
    f"os.{name}"
    for name in ("replace", "rename", "link", "symlink", "unlink", "remove", "mkdir", "truncate")
}


def test_only_listed_modules_write_files() -> None:
    def writes(name: str) -> bool:
        for called, call in calls(name):
            modes = [
                a.value
                for a in call.args[1:2]
                if isinstance(a, ast.Constant) and isinstance(a.value, str)
            ]
            if called in CHANGES or (
                called == "open" and any(set(mode) & set("wax+") for mode in modes)
            ):
                return True
        return False

    assert [name for name in MODULES if writes(name) and name not in WRITERS] == []


# of `ckpttool/formats`: what other packages may ask; the others are formats
OF_ALL_FORMATS = {"fit", "folders", "look", "opening", "protocol", "registry", "remarks"}


def outside_formats() -> list[str]:
    return [name for name in MODULES if not below(name, "ckpttool.formats")]


def test_no_format_is_imported_outside_of_formats() -> None:
    allowed = {"ckpttool.formats", *(f"ckpttool.formats.{name}" for name in OF_ALL_FORMATS)}
    wrong = []
    for name in outside_formats():
        for other in imports(name):
            if below(other, "ckpttool.formats") and other not in allowed:
                wrong.append(f"{name} imports {other}")
    assert wrong == []


def test_no_format_is_compared_by_name_outside_of_formats() -> None:
    """Whether a format can do something is asked of the format."""
    formats = {row.name for row in registry.TABLE} | {registry.MEMORY.name}
    wrong = []
    for name in outside_formats():
        if name == "ckpttool.core.checkpoint":
            continue  # says what a checkpoint in memory is
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.Compare) and names_a_format(node, formats):
                wrong.append(f"{name}:{node.lineno}")
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "FORMATS":
                wrong.append(f"{name}:{node.lineno}")
    assert wrong == []


def names_a_format(compared: ast.Compare, formats: set[str]) -> bool:
    """Return whether an attribute `format` or `name` of one is compared with a constant name."""
    parts = [compared.left, *compared.comparators]
    texts = {
        node.value
        for part in parts
        for node in ast.walk(part)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    attributes = {part.attr for part in parts if isinstance(part, ast.Attribute)}
    return bool(texts & formats) and bool(attributes & {"format", "name"})


def test_every_kind_of_problem_has_a_code() -> None:
    kinds: list[ast.expr] = []
    for name in MODULES:
        for function, call in calls(name):
            if function == "Problem":
                kinds += call.args[2:]
                kinds += [keyword.value for keyword in call.keywords if keyword.arg == "kind"]
    words = {kind.value for kind in kinds if isinstance(kind, ast.Constant)}
    assert words - CODES.keys() == set()
    assert len(words) > 10


SENTENCES = {"problem", "reason", "message", "hint", "detail"}
BEGINS_OR_ENDS = {"startswith", "endswith"}


def test_no_decision_compares_a_sentence() -> None:
    decisions = []
    for name in MODULES:
        for node in ast.walk(tree(name)):
            compared: ast.expr | None = None
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.In)):
                compared = node
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                compared = node.func.value if node.func.attr in BEGINS_OR_ENDS else None
            if compared is not None and SENTENCES.intersection(attributes(compared)):
                decisions.append(f"{name}:{compared.lineno}")
    assert decisions == []


def attributes(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute):
            yield inner.attr


def test_equivalent_mutants_are_still_in_the_code() -> None:
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    rows = toml.loads((ROOT / "tests/mutants/equivalent.toml").read_text())["mutant"]
    lines = {
        path: {line.strip() for line in (ROOT / path).read_text().splitlines()}
        for path in {r["path"] for r in rows}
    }
    assert [
        row
        for row in rows
        if row["was"] not in lines[row["path"]] or row["was"] == row["now"] or not row["why"]
    ] == []


def test_public_names_exist_and_have_docstrings() -> None:
    assert sorted(ckpttool.__all__) == list(ckpttool.__all__)
    public = {name for name in dir(ckpttool) if name in ckpttool.__all__}
    assert public == set(ckpttool.__all__)
    for name in ckpttool.__all__:
        assert getattr(ckpttool, name).__doc__


def test_importing_ckpttool_imports_no_other_module() -> None:
    """Public names are imported on first use."""
    code = (
        "import sys; before = set(sys.modules); import ckpttool; print(*sorted(set(sys.modules)"
        " - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert [
        name
        for name in done.stdout.split()
        if name.startswith(("ckpttool.", "torch", "typer", "rich"))
    ] == []
