"""Pickled modules, lists of tensors and arrays, which a file has in place of a state dict."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.plan import Dropped
from ckpttool.core.tables import without_tensors
from ckpttool.core.text import Info, prefix_of
from ckpttool.kinds import arrays, lists, modules

PACKED = frozenset({arrays.NAME, lists.NAME, modules.NAME})  # names of kinds

_ATTRIBUTE = "an attribute of the pickled module, which its state dict does not have"


def is_packed(section: Section) -> bool:
    return bool(section.packed_as)


def unpacked(
    checkpoint: Checkpoint, paths: Collection[str]
) -> tuple[Checkpoint, list[Dropped], list[Info]]:
    """Return the checkpoint with a state dict in place of each pickled module, list and dict of
    arrays at these paths.

    Other tensors of the modules are left out, and listed. The notes say what is replaced. Raise
    `Refused` for a list without names.
    """
    packed = [s for s in checkpoint.state_dicts if s.path in paths and is_packed(s)]
    if not packed:
        return checkpoint, [], []
    _check_names(packed)
    module_paths = [section.path for section in packed if section.module_class]
    prefixes = tuple(map(prefix_of, module_paths))
    sections: list[Section] = []
    dropped: list[Dropped] = []
    for section in checkpoint.sections:
        if section in packed:
            sections.append(replace(section, packed_as="", module_class=""))
            continue
        if section.kind != "other" or not module_paths:
            sections.append(section)
            continue
        inside = {entry.key for entry in section.tensors if entry.key.startswith(prefixes)}
        dropped += [Dropped(section.path, key, _ATTRIBUTE, "attribute") for key in inside]
        rest = without_tensors(section, inside)
        if rest.tensors:
            sections.append(rest)
    notes = [Info(_replaced(section), "remap") for section in packed]
    return replace(checkpoint, sections=tuple(sections)), dropped, notes


def _check_names(packed: list[Section]) -> None:
    """Raise `Refused` for a list whose tensors have no names."""
    problems = []
    for section in packed:
        if section.is_list and section.tensors[0].key == "0":
            text = "a list of tensors without names, or with other shapes than the model's"
            problems.append(Problem(text, section.title))
    if problems:
        raise Refused(
            "the names of a list's tensors are the names of a model's parameters, in order",
            hint="name the list as CKPT::SECTION, and pass the model that was averaged: --model"
            " package.module:attr, or file.py:attr",
            problems=problems,
        )


def _replaced(section: Section) -> str:
    if section.is_list:
        return f"{section.title} is a list of tensors: a state dict is written instead of it"
    if section.packed_as == arrays.NAME:
        return f"{section.title} holds NumPy arrays: they are written as tensors"
    return (
        f"{section.path or 'the file'} is a pickled module ({section.module_class}): its state"
        " dict is written, without the module"
    )
