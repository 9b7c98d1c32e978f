"""Pickled modules: what ``torch.save(model)`` writes, as in the files of ultralytics."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.plan import Dropped
from ckpttool.core.text import Info

NAME = "pickled-module"
ATTRIBUTE = "an attribute of the pickled module, which its state dict does not have"


def recognize(checkpoint: Checkpoint, section: Section) -> tuple[str, object] | None:
    if not section.module_class:
        return None
    text = (
        f"is a pickled module ({section.module_class}), which load_state_dict() does not accept:"
        " its state dict is read, the module never runs"
    )
    return text, section.module_class


def unpacked(checkpoint: Checkpoint, paths: list[str]) -> tuple[Checkpoint, list[Dropped]]:
    """Return the checkpoint with a state dict in place of each pickled module at these paths.

    Other tensors of the modules are left out, and listed.
    """
    modules = [s.path for s in checkpoint.state_dicts if s.module_class and s.path in paths]
    if not modules:
        return checkpoint, []
    prefixes = tuple(f"{path}." if path else "" for path in modules)
    sections: list[Section] = []
    dropped: list[Dropped] = []
    for section in checkpoint.sections:
        if section.kind == "state_dict" and section.path in modules:
            sections.append(replace(section, module_class=""))
            continue
        if section.kind != "other":
            sections.append(section)
            continue
        inside = {entry.key for entry in section.tensors if entry.key.startswith(prefixes)}
        dropped += [Dropped(section.path, key, ATTRIBUTE) for key in inside]
        rest = tuple(entry for entry in section.tensors if entry.key not in inside)
        if rest:
            sections.append(replace(section, tensors=rest))
    return replace(checkpoint, sections=tuple(sections)), dropped


def notes_on_unpacked(checkpoint: Checkpoint, paths: list[str]) -> list[Info]:
    """Return a note on each pickled module that `unpacked` replaces by its state dict."""
    notes = []
    for section in checkpoint.state_dicts:
        if section.module_class and section.path in paths:
            text = (
                f"{section.path or 'the file'} is a pickled module ({section.module_class}): its"
                " state dict is written, without the module"
            )
            notes.append(Info(text, "remap"))
    return notes
