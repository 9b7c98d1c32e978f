"""Refuse an output that would run code when it is loaded: dangerous pickle imports."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ckpttool.containers.nodes import entries_with_code
from ckpttool.core.checkpoint import Checkpoint, Span
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.pickle_imports import dangerous
from ckpttool.core.text import title_of
from ckpttool.formats.opening import unsafe_in
from ckpttool.formats.protocol import Format
from ckpttool.io.paths import name as name_of
from ckpttool.io.pieces import Files, Link


def copied_imports(output: Checkpoint, target: Format, files: Files) -> set[str]:
    """Return the names of the dangerous imports whose pickles are copied byte for byte into the
    files of the format `target`.
    """
    imports = dangerous(output.imports)
    if not imports:
        return set()
    linked: dict[str, str] = {}
    spans: list[Span] = []
    for name, content in files.items():
        if isinstance(content, Link):
            linked[name] = os.path.realpath(content.path)
        else:
            spans += [piece.data for piece in content if isinstance(piece.data, Span)]
    listed = target.linked_imports(imports, files, linked)
    links = set(linked.values()) if listed is None else set()
    names = listed or set()
    for imported in imports:
        in_span = any(imported.is_in(span.path, span.offset, span.length) for span in spans)
        if in_span or os.path.realpath(imported.file) in links:
            names.add(imported.name)
    return names


class CarriesCode(Refused):
    """The output would run code when it is loaded. `paths` are the entries to leave out, if that is
    enough.
    """

    paths: tuple[str, ...] = ()


def check_code(output: Checkpoint, names: Iterable[str], others: Iterable[str] = ()) -> None:
    """Raise `CarriesCode` if the output carries dangerous imports with these names, or in the
    `others`: copied files.
    """
    left, in_others = set(names), dangerous(unsafe_in(others))
    if not left and not in_others:
        return
    by_path: dict[str, list[str]] = {}
    for path, name in entries_with_code(output):
        by_path.setdefault(title_of(path), []).append(name)
        left.discard(name)
    problems = []
    for path, imported in by_path.items():
        problems.append(Problem(f"imports {', '.join(dict.fromkeys(imported))}", path))
    for name in sorted(left):
        problems.append(Problem("a dangerous import of the file's pickle", name))
    for other in in_others:
        problems.append(Problem(f"imports {other.name}", name_of(other.file)))
    hint = "--keep-pickled-code keeps it"
    if in_others:
        hint = f"name the weights alone as CKPT, without the other files of the folder; {hint}"
    error = CarriesCode(
        "the output would run code when it is loaded: dangerous pickle imports",
        hint=hint,
        problems=problems,
    )
    if not in_others and not left:
        error.paths = tuple(by_path)
    raise error
