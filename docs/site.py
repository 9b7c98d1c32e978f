"""Add to the site of `make docs` the pages of the repository's root, and references generated from
the code.

Links of pages outside docs/ lead to the page of the site, or to the file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Page of the site -> file of the repository
PAGES = {
    "index.md": "README.md",
    "benchmarks.md": "benchmarks/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
# File of the repository -> reference of the site, generated from it
SOURCES = {
    "ckpttool/evaluate/ops.py": "reference/operators.md",
    "ckpttool/core/limits.py": "reference/limits.md",
}
FILES = (
    "examples/demo.py",
    "examples/fusion_decoder.py",
    "examples/ci/README.md",
    "action.yml",
    "tests/docs/wrapped.md",
    "LICENSE",
)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def site_path(target: str) -> str:
    """Return where a file of the repository is in the site."""
    pages = {file: page for page, file in PAGES.items()} | SOURCES
    return pages.get(target, target.removeprefix("docs/"))


def relinked(text: str, file: str) -> str:
    """Return the text of a file of the repository with the links of its page in the site."""
    folder, page = os.path.dirname(file), os.path.dirname(site_path(file))

    def link(found: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, found[1]))
        return os.path.relpath(site_path(target), page or ".")

    return LINK.sub(link, text)


def commands() -> str:
    """Return the help of every command."""
    from ckpttool.cli.params import COMMANDS

    parts = ["# Commands", "The output of `ckpttool COMMAND --help`."]
    for name in ("", *COMMANDS):
        parts.append(
            f"## ckpttool {name}".rstrip() + f"\n\n```text\n{_help(*name.split()).strip()}\n```"
        )
    return "\n\n".join(parts)


def _help(*command: str) -> str:
    asked = [sys.executable, "-m", "ckpttool", *command, "--help"]
    plain = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(
        asked, capture_output=True, text=True, check=True, cwd=ROOT, env=plain
    ).stdout


def codes() -> str:
    """Return the table of all codes of reports."""
    from ckpttool.core.codes import markdown

    about = (
        "`ckpttool explain CODE` prints a row of these tables. Codes are stable, sentences may"
        " change."
    )
    return f"# Codes\n\n{about}\n\n{markdown()}"


def schemas() -> str:
    """Return the objects that the commands write; `ckpttool schema` prints their schemas."""
    from ckpttool.schemas import OBJECTS

    about = (
        "`ckpttool schema NAME` prints the JSON Schema of an object. [JSON output](../json.md)"
        " explains the fields."
    )
    rows = [f"| `{name}` | `{kind.title}` |" for name, kind in OBJECTS.items()]
    table = ["| NAME | `schema` in the object |", "| --- | --- |", *rows]
    return "\n".join(["# JSON Schemas", "", about, "", *table, ""])


def operators() -> str:
    """Return the operators that a plan may hold."""
    from ckpttool.evaluate.ops import GETITEM, OPS

    names = sorted({name.split(".")[1] for name in OPS if name != GETITEM})
    about = (
        "A plan may hold `getitem` and these operators of `aten`"
        " ([safety](../safety.md#operators))."
    )
    return f"# Operators\n\n{about}\n\n" + ", ".join(f"`{name}`" for name in names)


def limits() -> str:
    """Return the table of limits, with the comment of each line as its meaning."""
    from ckpttool.core.limits import Limits

    source = (ROOT / "ckpttool/core/limits.py").read_text(encoding="utf-8")
    rows = re.findall(r"^    (\w+): int = .*?# (.*)$", source, re.MULTILINE)
    table = [f"| `{name}` | {getattr(Limits(), name):,} | {said} |" for name, said in rows]
    about = "`--max-memory SIZE` changes those on memory ([safety](../safety.md#limits))."
    return "\n".join(
        ["# Limits", "", about, "", "| limit | default | of what |", "| --- | --- | --- |", *table]
    )


def python() -> str:
    """Return the functions and classes of the package, whose docstrings mkdocstrings inserts."""
    import ckpttool

    names = sorted(ckpttool.__all__, key=lambda name: (name[0].isupper(), name))
    modules = [f"::: ckpttool.{ckpttool._MODULES[name]}.{name}" for name in names]
    return "\n\n".join(["# Python reference", "[Python API](../api.md) has examples.", *modules])


REFERENCES = {
    "reference/commands.md": commands,
    "reference/codes.md": codes,
    "reference/schemas.md": schemas,
    "reference/operators.md": operators,
    "reference/limits.md": limits,
    "reference/python.md": python,
}


BADGES = re.compile(r"^\[!\[.*\n", re.MULTILINE)  # lines that only the repository's host shows


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not files of docs/."""
    from mkdocs.structure.files import File

    added = {
        page: relinked(BADGES.sub("", (ROOT / file).read_text(encoding="utf-8")), file)
        for page, file in PAGES.items()
    }
    added |= {page: text() for page, text in REFERENCES.items()}
    added |= {file: (ROOT / file).read_text(encoding="utf-8") for file in FILES}
    for page, text in added.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:
    """Change links that lead out of docs/."""
    return text if page.file.src_uri in PAGES else relinked(text, f"docs/{page.file.src_uri}")
