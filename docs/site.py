"""What `make docs` adds to the pages of docs/: those of the repository's root, and a reference made from the code.

A page that stands elsewhere in the repository keeps its links: each leads to the page of the site, or to the file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Page of the site -> the file of the repository that it is.
PAGES = {
    "index.md": "README.md",
    "benchmarks.md": "benchmarks/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
FILES = ("examples/demo.py", "examples/fusion_decoder.py", "LICENSE")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def site_path(target: str) -> str:
    """Where a file of the repository stands in the site."""
    pages = {file: page for page, file in PAGES.items()}
    return pages.get(target, target.removeprefix("docs/"))


def relinked(text: str, file: str) -> str:
    """The text of a file of the repository, its links leading from that file's page to those of the site."""
    folder, page = os.path.dirname(file), os.path.dirname(site_path(file))

    def link(found: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, found[1]))
        return os.path.relpath(site_path(target), page or ".")

    return LINK.sub(link, text)


def commands() -> str:
    """The help of every command, as it is printed."""
    lines = ["# Commands", "", "What `ckpttool COMMAND --help` prints.", ""]
    listed = re.findall(r"^  ([a-z][a-z-]+)  ", _help().split("Commands:")[1], re.MULTILINE)
    for name in ("", *listed):
        lines += [f"## ckpttool {name}".rstrip(), "", "```text", _help(*filter(None, [name])).strip(), "```", ""]
    return "\n".join(lines)


def _help(*command: str) -> str:
    asked = [sys.executable, "-m", "ckpttool", *command, "--help"]
    plain = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(asked, capture_output=True, text=True, check=True, cwd=ROOT, env=plain).stdout


def python() -> str:
    """The functions and the values of the package, from their docstrings."""
    import ckpttool

    names = sorted(ckpttool.__all__, key=lambda name: (name[0].isupper(), name))
    modules = [f"::: ckpttool.{ckpttool._MODULES[name]}.{name}" for name in names]
    return "\n\n".join(
        ["# Python reference", "The names of `import ckpttool`; [From Python](../api.md) shows them at work.", *modules]
    )


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that no file of docs/ is."""
    from mkdocs.structure.files import File

    made = {page: relinked((ROOT / file).read_text(encoding="utf-8"), file) for page, file in PAGES.items()}
    made |= {"reference/commands.md": commands(), "reference/python.md": python()}
    made |= {file: (ROOT / file).read_text(encoding="utf-8") for file in FILES}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:
    """Links of docs/ that lead out of it."""
    return text if page.file.src_uri in PAGES else relinked(text, f"docs/{page.file.src_uri}")
